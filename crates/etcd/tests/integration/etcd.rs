//! Tests of the leadership and of stored records, with a real etcd.

use std::path::Path;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use coreward_etcd::chunked_store::{ChunkedStore, StoredStateParts};
use coreward_etcd::cluster::EtcdClusterClient;
use coreward_etcd::leadership::{FleetLeaderState, LeaderCandidate, Leadership};
use coreward_etcd::local::{ClientTlsFiles, LocalEtcdMember};
use coreward_etcd::{Certificate, EtcdError, Identity, TlsOptions};
use coreward_tls::authority::{CertificateAuthority, CertificateValidity, DAY};
use coreward_tls::{FleetRole, TlsCredentialFiles};
use tempfile::TempDir;

/// Process of a single-member etcd cluster. It is killed when this value is dropped.
struct EtcdProcess {
    member: LocalEtcdMember,
    process: Child,
    _directory: TempDir,
}

impl EtcdProcess {
    fn start() -> Self {
        Self::start_with_command(|member, directory| {
            member.build_start_command(std::slice::from_ref(member), directory)
        })
    }

    fn start_with_command(start_command: impl FnOnce(&LocalEtcdMember, &Path) -> Command) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let member = LocalEtcdMember::single_member().unwrap();
        let process = start_command(&member, directory.path()).spawn();
        let process = process.expect("etcd cannot be started: `scripts/install run` installs it");
        Self { member, process, _directory: directory }
    }

    fn connect(&self) -> Arc<EtcdClusterClient> {
        Arc::new(EtcdClusterClient::new(&[self.member.endpoint()], None).unwrap())
    }
}

impl Drop for EtcdProcess {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Lease duration in tests that do not wait for the lease's end. It is long enough even if the machine pauses.
const LONG_LEASE_DURATION: Duration = Duration::from_secs(30);
/// Time limit for operations that etcd normally completes immediately.
const CONDITION_TIMEOUT: Duration = Duration::from_secs(20);

fn candidate_with_lease(name: &str, lease_duration: Duration) -> LeaderCandidate {
    LeaderCandidate { key_prefix: "/test".to_owned(), leader_record: name.to_owned(), lease_duration }
}

fn become_leader_with_long_lease(cluster: &Arc<EtcdClusterClient>, name: &str) -> Arc<Leadership> {
    become_leader(cluster, name, LONG_LEASE_DURATION)
}

fn become_leader(cluster: &Arc<EtcdClusterClient>, name: &str, lease_duration: Duration) -> Arc<Leadership> {
    let candidate = candidate_with_lease(name, lease_duration);
    let cluster_clone = cluster.clone();
    let campaign = async move { candidate.campaign_until_elected(cluster_clone, |_| {}).await };
    let campaign_with_timeout = async { tokio::time::timeout(Duration::from_secs(60), campaign).await };
    Arc::new(cluster.block_on(campaign_with_timeout).expect("no leader within a minute"))
}

fn open_store(cluster: &Arc<EtcdClusterClient>, leadership: &Arc<Leadership>) -> ChunkedStore {
    cluster.block_on(ChunkedStore::open(leadership.clone(), "/test")).unwrap()
}

fn wait_until(description: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < deadline, "{description}: not within a minute");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Returns parts that together exceed the size limit of an etcd request and the operation limit of a transaction.
fn large_state_parts(content_byte: u8) -> StoredStateParts {
    (0..300).map(|number| (format!("part/{number}"), vec![content_byte; 20_000])).collect()
}

fn put_key(cluster: &Arc<EtcdClusterClient>, key: &'static str, value: &'static str) {
    let put_result = cluster.block_on(
        cluster
            .call_until_deadline(coreward_etcd::clock::Deadline::now() + CONDITION_TIMEOUT, |mut client| async move {
                client.put(key, value, None).await
            }),
    );
    put_result.unwrap();
}

#[test]
fn next_leader_ignores_incomplete_changes() {
    let etcd = EtcdProcess::start();
    let cluster = etcd.connect();
    let first_leadership = become_leader_with_long_lease(&cluster, "a");
    let mut store = open_store(&cluster, &first_leadership);
    assert!(store.parts().is_empty());
    cluster.block_on(store.save(large_state_parts(1))).unwrap();
    let mut changed_parts = large_state_parts(1);
    changed_parts.insert("part/7".to_owned(), b"changed".to_vec());
    changed_parts.remove("part/8");
    cluster.block_on(store.save(changed_parts.clone())).unwrap();
    // This part is written as if by a leader that died before it wrote the manifest.
    put_key(&cluster, "/test/parts/part/9/77", "half");
    cluster.block_on(first_leadership.resign()).unwrap();
    let second_leadership = become_leader_with_long_lease(&cluster, "b");
    assert!(second_leadership.term() > first_leadership.term());
    let store = open_store(&cluster, &second_leadership);
    assert_eq!(store.parts(), &changed_parts);
    let remaining_keys_result = cluster.block_on(
        cluster
            .call_until_deadline(coreward_etcd::clock::Deadline::now() + CONDITION_TIMEOUT, |mut client| async move {
                client.get("/test/parts/part/9/77", None).await
            }),
    );
    assert_eq!(remaining_keys_result.unwrap().count(), 0);
}

#[test]
fn deposed_leader_cannot_write() {
    let etcd = EtcdProcess::start();
    let (cluster, other_cluster) = (etcd.connect(), etcd.connect());
    let first_leadership = become_leader_with_long_lease(&cluster, "a");
    let mut store = open_store(&cluster, &first_leadership);
    cluster.block_on(store.save(large_state_parts(1))).unwrap();
    // The leader loses its key without noticing, as if it had been stopped for a long time.
    put_key(&other_cluster, "/test/leader", "somebody");
    let delete_result = other_cluster.block_on(
        other_cluster
            .call_until_deadline(coreward_etcd::clock::Deadline::now() + CONDITION_TIMEOUT, |mut client| async move {
                client.delete("/test/leader", None).await
            }),
    );
    delete_result.unwrap();
    let second_leadership = become_leader_with_long_lease(&other_cluster, "b");
    let mut second_store = open_store(&other_cluster, &second_leadership);
    assert!(first_leadership.is_valid());
    for parts in [large_state_parts(2), large_state_parts(1).into_iter().take(3).collect()] {
        let save_error = cluster.block_on(store.save(parts)).unwrap_err();
        assert!(matches!(save_error, EtcdError::Deposed(_) | EtcdError::Unreachable { .. }), "{save_error}");
    }
    assert!(!first_leadership.is_valid());
    assert_eq!(second_store.parts(), &large_state_parts(1));
    cluster.block_on(second_store.save(large_state_parts(3))).unwrap();
    assert_eq!(open_store(&other_cluster, &second_leadership).parts(), &large_state_parts(3));
}

#[test]
fn leader_without_etcd_stops_when_lease_expires() {
    let mut etcd = EtcdProcess::start();
    let cluster = etcd.connect();
    let lease_duration = Duration::from_secs(5);
    let leadership = become_leader(&cluster, "a", lease_duration);
    let mut store = open_store(&cluster, &leadership);
    std::thread::sleep(lease_duration + Duration::from_secs(1));
    assert!(leadership.is_valid(), "its lease is renewed");
    etcd.process.kill().unwrap();
    let start_time = Instant::now();
    assert!(leadership.is_valid(), "not at once");
    let save_error = cluster.block_on(store.save(large_state_parts(1))).unwrap_err();
    assert!(matches!(save_error, EtcdError::Unreachable { .. }), "{save_error}");
    let end_reason = cluster.block_on(leadership.wait_for_end());
    assert!(end_reason.contains("lease"), "{end_reason}");
    assert!(start_time.elapsed() < 5 * lease_duration && !leadership.is_valid());
}

#[test]
fn followers_can_read_the_leader_record() {
    let etcd = EtcdProcess::start();
    let cluster = etcd.connect();
    let first_leadership = become_leader_with_long_lease(&cluster, "a");
    let (state_sender, state_receiver) = std::sync::mpsc::channel();
    let second_cluster = cluster.clone();
    let second_campaign_task = cluster.spawn(async move {
        candidate_with_lease("b", LONG_LEASE_DURATION)
            .campaign_until_elected(second_cluster, move |state| state_sender.send(state).unwrap())
            .await
    });
    assert_eq!(state_receiver.recv_timeout(CONDITION_TIMEOUT).unwrap(), FleetLeaderState::Leader("a".to_owned()));
    assert!(!second_campaign_task.is_finished());
    cluster.block_on(first_leadership.resign()).unwrap();
    let second_leadership = cluster.block_on(second_campaign_task).unwrap();
    assert!(second_leadership.is_valid() && !first_leadership.is_valid());
    let leader_state = cluster.block_on(candidate_with_lease("c", LONG_LEASE_DURATION).read_leader(&cluster)).unwrap();
    assert_eq!(leader_state, FleetLeaderState::Leader("b".to_owned()));
}

#[test]
fn revoked_leases_let_another_candidate_win() {
    let etcd = EtcdProcess::start();
    let (cluster, other_cluster) = (etcd.connect(), etcd.connect());
    wait_until("etcd has started", || read_leader_or_error(&cluster) == Ok(FleetLeaderState::NoLeader));
    // This process does not use the leadership that it has won.
    let lease_duration = Duration::from_secs(60);
    drop(cluster.block_on(candidate_with_lease("a", lease_duration).campaign_once(cluster.clone())).unwrap());
    assert!(
        other_cluster.block_on(candidate_with_lease("b", lease_duration).campaign_once(other_cluster.clone())).is_err()
    );
    assert!(cluster.block_on(cluster.revoke_all_leases()).unwrap());
    // The campaign may continue while the process ends, but must not win.
    assert!(cluster.block_on(candidate_with_lease("a", lease_duration).campaign_once(cluster.clone())).is_err());
    assert_eq!(read_leader_or_error(&other_cluster), Ok(FleetLeaderState::NoLeader));
    let second_leadership =
        other_cluster.block_on(candidate_with_lease("b", lease_duration).campaign_once(other_cluster.clone())).unwrap();
    // A leader that has resigned has no key left.
    other_cluster.block_on(second_leadership.resign()).unwrap();
    assert!(!other_cluster.block_on(other_cluster.revoke_all_leases()).unwrap());
}

/// Certificate authority of a test, which issues certificates to etcd and to controllers.
struct TestCertificateAuthority {
    directory: TempDir,
    authority: CertificateAuthority,
}

impl TestCertificateAuthority {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let authority =
            CertificateAuthority::init(&directory.path().join("authority"), &"prod".parse().unwrap(), 30 * DAY)
                .unwrap();
        Self { directory, authority }
    }

    fn issue_certificate(&self, name: &str, address: &str, validity: CertificateValidity) -> TlsCredentialFiles {
        let name = name.parse().unwrap();
        let directory = self.directory.path().join(format!("{name}"));
        let identity =
            coreward_tls::FleetIdentity { fleet: "prod".parse().unwrap(), role: FleetRole::Controller, name };
        let certificate_and_key = self.authority.issue_certificate(&identity, &[address.to_owned()], validity).unwrap();
        certificate_and_key.write_files(&directory, &self.authority).unwrap();
        let file_path = |name: &str| directory.join(name);
        TlsCredentialFiles {
            ca_path: file_path("ca.crt"),
            certificate_path: file_path("own.crt"),
            key_path: file_path("own.key"),
        }
    }

    fn issue_valid_certificate(&self, name: &str) -> TlsCredentialFiles {
        self.issue_certificate(name, "127.0.0.1", CertificateValidity::from_now(DAY))
    }
}

fn start_etcd_with_tls(files: TlsCredentialFiles) -> EtcdProcess {
    let TlsCredentialFiles { ca_path: ca, certificate_path: certificate, key_path: key } = files;
    let client_tls = ClientTlsFiles { ca_file: ca, certificate_file: certificate, key_file: key };
    EtcdProcess::start_with_command(|member, directory| {
        member.build_secure_start_command(std::slice::from_ref(member), directory, &client_tls)
    })
}

fn tls_options(ca: &TlsCredentialFiles, client_files: Option<&TlsCredentialFiles>) -> TlsOptions {
    let read_file = |path: &Path| std::fs::read(path).unwrap();
    let tls_options = TlsOptions::new().ca_certificate(Certificate::from_pem(read_file(&ca.ca_path)));
    match client_files {
        Some(files) => {
            tls_options.identity(Identity::from_pem(read_file(&files.certificate_path), read_file(&files.key_path)))
        }
        None => tls_options,
    }
}

fn connect_with_tls(endpoint: &str, tls: &TlsOptions) -> Arc<EtcdClusterClient> {
    Arc::new(EtcdClusterClient::new(&[endpoint.to_owned()], Some(tls)).unwrap())
}

fn read_leader_or_error(cluster: &EtcdClusterClient) -> Result<FleetLeaderState, String> {
    cluster
        .block_on(candidate_with_lease("x", LONG_LEASE_DURATION).read_leader(cluster))
        .map_err(|error| error.to_string())
}

#[test]
fn etcd_requires_tls_and_valid_certificates() {
    let (trusted_authority, foreign_authority) = (TestCertificateAuthority::new(), TestCertificateAuthority::new());
    let etcd = start_etcd_with_tls(trusted_authority.issue_valid_certificate("etcd1"));
    let client_files = trusted_authority.issue_valid_certificate("c1");
    let endpoint = etcd.member.secure_endpoint();
    let cluster = connect_with_tls(&endpoint, &tls_options(&client_files, Some(&client_files)));
    let leadership = become_leader_with_long_lease(&cluster, "a");
    let mut store = open_store(&cluster, &leadership);
    cluster.block_on(store.save(large_state_parts(1))).unwrap();
    assert_eq!(open_store(&cluster, &leadership).parts(), &large_state_parts(1));

    let now = coreward_tls::certificate::unix_now();
    let expired_validity = CertificateValidity { not_before: now - 2 * DAY, not_after: now - DAY };
    let (foreign_certificate, expired_certificate) = (
        foreign_authority.issue_valid_certificate("c1"),
        trusted_authority.issue_certificate("old", "127.0.0.1", expired_validity),
    );
    for (description, tls, expected) in [
        (
            "an authority that did not sign etcd's",
            tls_options(&foreign_certificate, Some(&client_files)),
            "its certificate is signed by no authority in `ca`",
        ),
        ("no certificate", tls_options(&client_files, None), "etcd rejects our certificate, or that we show none"),
        (
            "a certificate that another authority signed",
            tls_options(&client_files, Some(&foreign_certificate)),
            "etcd rejects our certificate, or that we show none",
        ),
        (
            "one that has expired",
            tls_options(&client_files, Some(&expired_certificate)),
            "etcd rejects our certificate, or that we show none",
        ),
    ] {
        let cluster = connect_with_tls(&endpoint, &tls);
        let error_text = read_leader_or_error(&cluster).unwrap_err();
        println!("{description}: {error_text}");
        assert!(error_text.contains(&endpoint) && error_text.contains(expected), "{description}: {error_text}");
        cluster
            .block_on(cluster.clone().replace_certificates(tls_options(&client_files, Some(&client_files))))
            .unwrap();
        assert_eq!(
            read_leader_or_error(&cluster),
            Ok(FleetLeaderState::Leader("a".to_owned())),
            "the next certificates do"
        );
    }
    let cluster_without_tls = EtcdClusterClient::new(&[etcd.member.endpoint()], None).unwrap();
    read_leader_or_error(&cluster_without_tls).unwrap_err();
    let etcd_at_another_address = start_etcd_with_tls(trusted_authority.issue_certificate(
        "etcd2",
        "192.0.2.1",
        CertificateValidity::from_now(DAY),
    ));
    let cluster = connect_with_tls(
        &etcd_at_another_address.member.secure_endpoint(),
        &tls_options(&client_files, Some(&client_files)),
    );
    // Until etcd has started, connections are refused, or time out on a busy machine.
    wait_until("another host", || {
        let error_text = read_leader_or_error(&cluster).unwrap_err();
        println!("another host: {error_text}");
        error_text.contains("192.0.2.1")
    });
}
