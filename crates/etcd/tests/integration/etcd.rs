//! Leadership and records, with a real etcd.

use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use coreward_etcd::chunked_store::{ChunkedStore, Chunks};
use coreward_etcd::cluster::Cluster;
use coreward_etcd::leadership::{Candidate, LeaderState, Leadership};
use coreward_etcd::local::{ClientTls, Member};
use coreward_etcd::{Certificate, EtcdError, Identity, TlsOptions};
use coreward_tls::authority::{Authority, DAY, Validity};
use coreward_tls::{CredentialFiles, Role};
use tempfile::TempDir;

/// Process of one etcd member, which ends when the value is dropped.
struct Etcd {
    member: Member,
    process: Child,
    _directory: TempDir,
}

impl Etcd {
    fn start() -> Self {
        Self::start_with(|member, directory| member.command(std::slice::from_ref(member), directory))
    }

    fn start_with(command: impl FnOnce(&Member, &Path) -> Command) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let member = Member::single().unwrap();
        let process = command(&member, directory.path()).spawn();
        let process = process.expect("etcd cannot be started: `scripts/install run` installs it");
        Self { member, process, _directory: directory }
    }

    fn cluster(&self) -> Arc<Cluster> {
        Arc::new(Cluster::new(&[self.member.endpoint()], None).unwrap())
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Lease duration in tests that do not wait for its end: it survives a pause of the machine.
const LEASE: Duration = Duration::from_secs(30);
/// Maximum time for operations that etcd performs at once.
const TIMEOUT: Duration = Duration::from_secs(20);

fn candidate(name: &str, lease_duration: Duration) -> Candidate {
    Candidate { prefix: "/test".to_owned(), value: name.to_owned(), lease_duration }
}

fn lead(cluster: &Arc<Cluster>, name: &str) -> Arc<Leadership> {
    lead_for(cluster, name, LEASE)
}

fn lead_for(cluster: &Arc<Cluster>, name: &str, lease: Duration) -> Arc<Leadership> {
    let candidate = candidate(name, lease);
    let from = cluster.clone();
    let work = async move { candidate.campaign(from, |_| {}).await };
    let limited = async { tokio::time::timeout(Duration::from_secs(60), work).await };
    Arc::new(cluster.block_on(limited).expect("no leader within a minute"))
}

fn open(cluster: &Arc<Cluster>, leadership: &Arc<Leadership>) -> ChunkedStore {
    cluster.block_on(ChunkedStore::open(leadership.clone(), "/test")).unwrap()
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < end, "{what}: not within a minute");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Returns parts that are together larger than a request to etcd may be, and more than a transaction may change.
fn large_content(marker: u8) -> Chunks {
    (0..300).map(|number| (format!("part/{number}"), vec![marker; 20_000])).collect()
}

fn put(cluster: &Arc<Cluster>, key: &'static str, value: &'static str) {
    let done =
        cluster.block_on(cluster.call(coreward_etcd::clock::Deadline::now() + TIMEOUT, |mut client| async move {
            client.put(key, value, None).await
        }));
    done.unwrap();
}

#[test]
fn next_leader_reads_complete_changes_only() {
    let etcd = Etcd::start();
    let cluster = etcd.cluster();
    let first = lead(&cluster, "a");
    let mut store = open(&cluster, &first);
    assert!(store.parts().is_empty());
    cluster.block_on(store.save(large_content(1))).unwrap();
    let mut changed = large_content(1);
    changed.insert("part/7".to_owned(), b"changed".to_vec());
    changed.remove("part/8");
    cluster.block_on(store.save(changed.clone())).unwrap();
    // As of a leader that died before its manifest.
    put(&cluster, "/test/parts/part/9/77", "half");
    cluster.block_on(first.resign()).unwrap();
    let second = lead(&cluster, "b");
    assert!(second.term() > first.term());
    let store = open(&cluster, &second);
    assert_eq!(store.parts(), &changed);
    let left =
        cluster.block_on(cluster.call(coreward_etcd::clock::Deadline::now() + TIMEOUT, |mut client| async move {
            client.get("/test/parts/part/9/77", None).await
        }));
    assert_eq!(left.unwrap().count(), 0);
}

#[test]
fn deposed_leader_cannot_write() {
    let etcd = Etcd::start();
    let (cluster, other) = (etcd.cluster(), etcd.cluster());
    let first = lead(&cluster, "a");
    let mut store = open(&cluster, &first);
    cluster.block_on(store.save(large_content(1))).unwrap();
    // Its lease is taken from it, as when it was stopped for long; it does not know.
    put(&other, "/test/leader", "somebody");
    let delete = other.block_on(other.call(coreward_etcd::clock::Deadline::now() + TIMEOUT, |mut client| async move {
        client.delete("/test/leader", None).await
    }));
    delete.unwrap();
    let second = lead(&other, "b");
    let mut successor = open(&other, &second);
    assert!(first.is_valid());
    for parts in [large_content(2), large_content(1).into_iter().take(3).collect()] {
        let refused = cluster.block_on(store.save(parts)).unwrap_err();
        assert!(matches!(refused, EtcdError::Deposed(_) | EtcdError::Unreachable { .. }), "{refused}");
    }
    assert!(!first.is_valid());
    assert_eq!(successor.parts(), &large_content(1));
    cluster.block_on(successor.save(large_content(3))).unwrap();
    assert_eq!(open(&other, &second).parts(), &large_content(3));
}

#[test]
fn leader_without_etcd_ends_by_its_own_clock() {
    let mut etcd = Etcd::start();
    let cluster = etcd.cluster();
    let lease = Duration::from_secs(5);
    let leadership = lead_for(&cluster, "a", lease);
    let mut store = open(&cluster, &leadership);
    std::thread::sleep(lease + Duration::from_secs(1));
    assert!(leadership.is_valid(), "its lease is renewed");
    etcd.process.kill().unwrap();
    let began = Instant::now();
    assert!(leadership.is_valid(), "not at once");
    let refused = cluster.block_on(store.save(large_content(1))).unwrap_err();
    assert!(matches!(refused, EtcdError::Unreachable { .. }), "{refused}");
    let why = cluster.block_on(leadership.wait_for_end());
    assert!(why.contains("lease"), "{why}");
    assert!(began.elapsed() < 5 * lease && !leadership.is_valid());
}

#[test]
fn followers_name_the_leader() {
    let etcd = Etcd::start();
    let cluster = etcd.cluster();
    let first = lead(&cluster, "a");
    let (reported, seen) = std::sync::mpsc::channel();
    let waiting = cluster.clone();
    let second = cluster
        .spawn(async move { candidate("b", LEASE).campaign(waiting, move |now| reported.send(now).unwrap()).await });
    assert_eq!(seen.recv_timeout(TIMEOUT).unwrap(), LeaderState::Leader("a".to_owned()));
    assert!(!second.is_finished());
    cluster.block_on(first.resign()).unwrap();
    let second = cluster.block_on(second).unwrap();
    assert!(second.is_valid() && !first.is_valid());
    let now = cluster.block_on(candidate("c", LEASE).read_leader(&cluster)).unwrap();
    assert_eq!(now, LeaderState::Leader("b".to_owned()));
}

#[test]
fn resign_during_election_releases_lease() {
    let etcd = Etcd::start();
    let (cluster, other) = (etcd.cluster(), etcd.cluster());
    eventually("etcd has started", || read_leader(&cluster) == Ok(LeaderState::NoLeader));
    // It is not yet known that it has won.
    let lease = Duration::from_secs(60);
    drop(cluster.block_on(candidate("a", lease).campaign_once(cluster.clone())).unwrap());
    assert!(other.block_on(candidate("b", lease).campaign_once(other.clone())).is_err());
    assert!(cluster.block_on(cluster.revoke_all_leases()).unwrap());
    // Its campaign goes on until the process has ended, and wins nothing.
    assert!(cluster.block_on(candidate("a", lease).campaign_once(cluster.clone())).is_err());
    assert_eq!(read_leader(&other), Ok(LeaderState::NoLeader));
    let second = other.block_on(candidate("b", lease).campaign_once(other.clone())).unwrap();
    // A leader that resigned has no key left.
    other.block_on(second.resign()).unwrap();
    assert!(!other.block_on(other.revoke_all_leases()).unwrap());
}

/// Certificate authority, which issues certificates for addresses of etcd and of controllers.
struct Signer {
    directory: TempDir,
    authority: Authority,
}

impl Signer {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let authority =
            Authority::init(&directory.path().join("authority"), &"prod".parse().unwrap(), 30 * DAY).unwrap();
        Self { directory, authority }
    }

    fn issue(&self, name: &str, address: &str, validity: Validity) -> CredentialFiles {
        let name = name.parse().unwrap();
        let directory = self.directory.path().join(format!("{name}"));
        let identity = coreward_tls::Identity { fleet: "prod".parse().unwrap(), role: Role::Controller, name };
        let issued = self.authority.issue(&identity, &[address.to_owned()], validity).unwrap();
        issued.write(&directory, &self.authority).unwrap();
        let file = |name: &str| directory.join(name);
        CredentialFiles { ca: file("ca.crt"), certificate: file("own.crt"), key: file("own.key") }
    }

    fn issue_valid(&self, name: &str) -> CredentialFiles {
        self.issue(name, "127.0.0.1", Validity::from_now(DAY))
    }
}

fn serving(files: CredentialFiles) -> Etcd {
    let CredentialFiles { ca, certificate, key } = files;
    let tls = ClientTls { ca, certificate, key };
    Etcd::start_with(|member, directory| member.secure_command(std::slice::from_ref(member), directory, &tls))
}

fn options(ca: &CredentialFiles, own: Option<&CredentialFiles>) -> TlsOptions {
    let read = |path: &Path| std::fs::read(path).unwrap();
    let options = TlsOptions::new().ca_certificate(Certificate::from_pem(read(&ca.ca)));
    match own {
        Some(own) => options.identity(Identity::from_pem(read(&own.certificate), read(&own.key))),
        None => options,
    }
}

fn connect(endpoint: &str, tls: &TlsOptions) -> Arc<Cluster> {
    Arc::new(Cluster::new(&[endpoint.to_owned()], Some(tls)).unwrap())
}

fn read_leader(cluster: &Cluster) -> Result<LeaderState, String> {
    cluster.block_on(candidate("x", LEASE).read_leader(cluster)).map_err(|error| error.to_string())
}

#[test]
fn etcd_requires_tls_and_valid_certificates() {
    let (ours, foreign) = (Signer::new(), Signer::new());
    let etcd = serving(ours.issue_valid("etcd1"));
    let own = ours.issue_valid("c1");
    let endpoint = etcd.member.secure_endpoint();
    let cluster = connect(&endpoint, &options(&own, Some(&own)));
    let leadership = lead(&cluster, "a");
    let mut store = open(&cluster, &leadership);
    cluster.block_on(store.save(large_content(1))).unwrap();
    assert_eq!(open(&cluster, &leadership).parts(), &large_content(1));

    let now = coreward_tls::certificate::unix_now();
    let past = Validity { not_before: now - 2 * DAY, not_after: now - DAY };
    let (other, expired) = (foreign.issue_valid("c1"), ours.issue("old", "127.0.0.1", past));
    for (what, tls, expected) in [
        (
            "an authority that did not sign etcd's",
            options(&other, Some(&own)),
            "its certificate is signed by no authority in `ca`",
        ),
        ("no certificate", options(&own, None), "etcd refuses our certificate, or that we show none"),
        (
            "a certificate that another authority signed",
            options(&own, Some(&other)),
            "etcd refuses our certificate, or that we show none",
        ),
        ("one that has expired", options(&own, Some(&expired)), "etcd refuses our certificate, or that we show none"),
    ] {
        let cluster = connect(&endpoint, &tls);
        let printed = read_leader(&cluster).unwrap_err();
        println!("{what}: {printed}");
        assert!(printed.contains(&endpoint) && printed.contains(expected), "{what}: {printed}");
        cluster.block_on(cluster.clone().replace_certificates(options(&own, Some(&own)))).unwrap();
        assert_eq!(read_leader(&cluster), Ok(LeaderState::Leader("a".to_owned())), "the next certificates do");
    }
    let plain = Cluster::new(&[etcd.member.endpoint()], None).unwrap();
    read_leader(&plain).unwrap_err();
    let elsewhere = serving(ours.issue("etcd2", "192.0.2.1", Validity::from_now(DAY)));
    let cluster = connect(&elsewhere.member.secure_endpoint(), &options(&own, Some(&own)));
    // Until it has started, it is not found.
    let mut printed = String::new();
    eventually("another host", || {
        printed = read_leader(&cluster).unwrap_err();
        println!("another host: {printed}");
        !printed.contains("refused")
    });
    assert!(printed.contains("192.0.2.1"), "{printed}");
}
