//! Several controllers with TLS everywhere: client certificates for etcd, https for users. Records, including drains,
//! survive a killed leader, and are copied from one store to the other and back.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use coreward_etcd::local::{ClientTls, Member};
use coreward_testbed::addresses::CONTROLLER_ADDRESS;
use coreward_testbed::fleet::{certificate_directory, controller_address_of, coreward_command};
use coreward_testbed::process::Process;
use coreward_testbed::{Testbed, TestbedOptions, missing_testbed_rights, skip_if};
use coreward_tls::authority::{Authority, DAY, Validity};
use coreward_tls::{CredentialFiles, Identity, Role, read_certificates};
use nix::sys::signal::Signal;

use crate::support::eventually;

/// Maximum time until another controller leads: a multiple of the lease, for slow machines.
const TAKEOVER_LIMIT: Duration = Duration::from_secs(90);
/// Maximum time until a process ends, which may write to etcd first: only a safety net.
const EXIT_TIMEOUT: Duration = Duration::from_secs(60);
const DOCUMENT: &str = "[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\n\
                        [[server]]\nname = \"s1\"\naddress = \"10.1.1.1\"\n[[server]]\nname = \"s2\"\naddress = \
                        \"10.1.1.2\"\n";

/// Testbed with etcd and certificates for controllers. The fields are dropped in this order, the testbed last.
struct TestEnv {
    _etcd: Process,
    member: Member,
    operator: CredentialFiles,
    testbed: Testbed,
}

fn authority(directory: &Path) -> Authority {
    Authority::init(directory, &"testbed".parse().unwrap(), 30 * DAY).unwrap()
}

fn issue(authority: &Authority, directory: &Path, role: Role, name: &str, address: Option<&str>) -> CredentialFiles {
    let identity = Identity { fleet: "testbed".parse().unwrap(), role, name: name.parse().unwrap() };
    let addresses: Vec<String> = address.into_iter().map(str::to_owned).collect();
    let bundle = directory.join(format!("{role}-{name}"));
    authority.issue(&identity, &addresses, Validity::from_now(DAY)).unwrap().write(&bundle, authority).unwrap();
    let file = |name: &str| bundle.join(name);
    CredentialFiles { ca: file("ca.crt"), certificate: file("own.crt"), key: file("own.key") }
}

fn tls_table(CredentialFiles { ca, certificate, key }: &CredentialFiles) -> String {
    format!("ca = {ca:?}\ncertificate = {certificate:?}\nkey = {key:?}\n")
}

fn api_url(number: u16) -> String {
    format!("https://{CONTROLLER_ADDRESS}:{}", 7410 + number)
}

impl TestEnv {
    fn start(instance: &str) -> Self {
        let options = TestbedOptions { instance: instance.to_owned(), servers: 1, ..Default::default() };
        let testbed = Testbed::create(options).unwrap();
        let directory = certificate_directory(&testbed);
        let authority = authority(&directory);
        let address = CONTROLLER_ADDRESS.to_string();
        let of_etcd = issue(&authority, &directory, Role::Controller, "etcd1", Some(&address));
        for name in ["c1", "c2", "c3"] {
            issue(&authority, &directory, Role::Controller, name, Some(&address));
        }
        let operator = issue(&authority, &directory, Role::Operator, "ann", None);
        let [member] = &Member::cluster(1, CONTROLLER_ADDRESS.into(), 2379)[..] else { unreachable!("one") };
        let CredentialFiles { ca, certificate, key } = of_etcd;
        let tls = ClientTls { ca, certificate, key };
        let command = member.secure_command(std::slice::from_ref(member), &testbed.directory(), &tls);
        let etcd = testbed.spawn(testbed.controller(), command);
        let etcd = etcd.expect("etcd cannot be started: `scripts/install run` installs it");
        Self { _etcd: etcd, member: member.clone(), operator, testbed }
    }

    fn files(&self, role: Role, name: &str) -> CredentialFiles {
        let file = |file: &str| certificate_directory(&self.testbed).join(format!("{role}-{name}")).join(file);
        CredentialFiles { ca: file("ca.crt"), certificate: file("own.crt"), key: file("own.key") }
    }

    fn write(&self, name: &str, number: u16, more: &str) -> PathBuf {
        let file = self.testbed.directory().join(format!("{name}.toml"));
        let own = tls_table(&self.files(Role::Controller, &format!("c{number}")));
        let (listen, api) = (controller_address_of(number), api_url(number).replace("https://", ""));
        fs::write(&file, format!("listen = \"{listen}\"\napi = \"{api}\"\n{more}\n[tls]\n{own}")).unwrap();
        file
    }

    /// Writes the configuration file of a controller that has its own store.
    fn write_store_config(&self) -> PathBuf {
        let store = self.testbed.directory().join("alone.redb");
        self.write("alone", 1, &format!("store = {store:?}\n"))
    }

    /// Writes the configuration file of one of several controllers, which authenticates to etcd with `own`.
    fn write_etcd_config(&self, name: &str, number: u16, own: &CredentialFiles) -> PathBuf {
        let endpoint = self.member.secure_endpoint();
        let tokens = self.testbed.directory();
        let more = format!(
            "token_directory = {tokens:?}\n[etcd]\nendpoints = [\"{endpoint}\"]\nlease = \"4s\"\n[etcd.tls]\n{}",
            tls_table(own)
        );
        self.write(name, number, &more)
    }

    fn start_controller(&self, file: &Path) -> Process {
        let log = File::options().create(true).append(true).open(file.with_extension("log")).unwrap();
        let mut command = Command::new(coreward_command().unwrap());
        command.arg("controller").arg("--config").arg(file);
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        self.testbed.spawn(self.testbed.controller(), command).unwrap()
    }

    fn run(&self, arguments: &[&str]) -> Result<String, String> {
        let mut command = Command::new(coreward_command().unwrap());
        command.args(arguments);
        let output = self.testbed.run(self.testbed.controller(), command);
        output.map(|output| String::from_utf8(output.stdout).unwrap()).map_err(|error| format!("{error:#}"))
    }

    /// Runs `coreward doctor`, which must find a fault, and returns its output.
    fn doctor(&self, file: &Path) -> String {
        let mut command = Command::new("sh");
        command.args(["-c", "\"$0\" doctor --config \"$1\" || true"]).arg(coreward_command().unwrap()).arg(file);
        String::from_utf8(self.testbed.run(self.testbed.controller(), command).unwrap().stdout).unwrap()
    }

    /// Runs `coreward ARGUMENTS` against these controllers by https, with an operator's certificate.
    fn run_at(&self, controllers: &[u16], arguments: &[&str]) -> Result<String, String> {
        let urls: Vec<String> = controllers.iter().map(|number| api_url(*number)).collect();
        let CredentialFiles { ca, certificate, key } = &self.operator;
        let [ca, certificate, key] = [ca, certificate, key].map(|file| file.to_str().unwrap());
        let urls = urls.join(",");
        let contact = ["--controller", &urls, "--ca", ca, "--certificate", certificate, "--key", key];
        self.run(&[arguments, &contact].concat())
    }

    fn apply(&self, controllers: &[u16], document: &str) -> Result<String, String> {
        let file = self.testbed.directory().join("applied.toml");
        fs::write(&file, document).unwrap();
        self.run_at(controllers, &["apply", "--yes", file.to_str().unwrap()])
    }

    /// Returns the names of the servers that are drained by `coreward drain`; `None`: there is no leader.
    fn drained(&self, controllers: &[u16]) -> Option<Vec<String>> {
        let text = self.run_at(controllers, &["status", "--format", "json"]).ok()?;
        let status: serde_json::Value = serde_json::from_str(&text).unwrap();
        let servers = status["servers"].as_array().unwrap().iter();
        let drained = servers.filter(|server| server["state_reason"] == "by `coreward drain`");
        let mut names: Vec<String> = drained.map(|server| server["name"].as_str().unwrap().to_owned()).collect();
        // The output is sorted by the servers' random ids.
        names.sort();
        Some(names)
    }

    /// Queries each of these controllers. Returns the leader and the other controllers' answers; `None`: there is not
    /// exactly one leader.
    fn leader(&self, controllers: &[u16]) -> Option<(u16, Vec<String>)> {
        let (mut leaders, mut refusals) = (Vec::new(), Vec::new());
        for number in controllers {
            match self.run_at(&[*number], &["fleet", "show"]) {
                Ok(_) => leaders.push(*number),
                Err(error) => refusals.push(error),
            }
        }
        if let [leader] = leaders[..] { Some((leader, refusals)) } else { None }
    }
}

#[test]
fn commands_find_the_leader_and_drains_survive_it() {
    skip_if!(missing_testbed_rights());
    let env = TestEnv::start("ctltls");
    let all = [1, 2, 3];
    let alone = env.write_store_config();
    let files = all.map(|number| {
        let own = env.files(Role::Controller, &format!("c{number}"));
        env.write_etcd_config(&format!("c{number}"), number, &own)
    });
    let [alone_text, first_text] = [&alone, &files[0]].map(|path| path.to_str().unwrap());

    // One controller is replaced by several.
    let mut single = env.start_controller(&alone);
    eventually(TAKEOVER_LIMIT, "the document is in force", || env.apply(&[1], DOCUMENT).is_ok());
    env.run_at(&[1], &["drain", "s1", "--force"]).unwrap();
    assert_eq!(env.drained(&[1]).unwrap(), ["s1"]);
    assert!(single.terminate(EXIT_TIMEOUT).unwrap().success());
    let copied = env.run(&["store", "copy", "--from", alone_text, "--to", first_text]).unwrap();
    assert!(copied.contains("2 servers, 1 services"), "{copied}");

    let mut controllers: Vec<Option<Process>> = files.iter().map(|file| Some(env.start_controller(file))).collect();
    eventually(TAKEOVER_LIMIT, "the drain came along", || env.drained(&all) == Some(vec!["s1".to_owned()]));
    eventually(TAKEOVER_LIMIT, "s2 is drained", || env.run_at(&all, &["drain", "s2", "--force"]).is_ok());

    // Followers name the leader and the address of its API.
    let mut leader = 0;
    eventually(TAKEOVER_LIMIT, "the others name the leader", || {
        let Some((found, refusals)) = env.leader(&all) else { return false };
        leader = found;
        let named = format!("{} (API: {}) does", controller_address_of(leader), api_url(leader));
        refusals.iter().all(|refusal| refusal.contains(&named))
    });

    // A revoked certificate is rejected without a leader, too.
    let follower = all.into_iter().find(|number| *number != leader).unwrap();
    let (file, controller) = (&files[usize::from(follower) - 1], &controllers[usize::from(follower) - 1]);
    let text = fs::read_to_string(file).unwrap();
    let lost = read_certificates(&env.operator.certificate).unwrap()[0].fingerprint;
    let reported = |text: &str| {
        fs::write(file, text).unwrap();
        controller.as_ref().unwrap().signal(Signal::SIGHUP).unwrap();
    };
    let refused = || env.run_at(&[follower], &["status"]).is_err_and(|error| error.contains("revoked"));
    reported(&format!("revoked_certificates = [\"{lost}\"]\n{text}"));
    eventually(TAKEOVER_LIMIT, "it is refused", refused);
    reported(&text);
    eventually(TAKEOVER_LIMIT, "it is no longer rejected", || !refused());

    // The leader is killed.
    let mut killed = controllers[usize::from(leader) - 1].take().unwrap();
    killed.signal(Signal::SIGKILL).unwrap();
    killed.wait(EXIT_TIMEOUT).unwrap();
    let weighed = DOCUMENT.replacen("name = \"s1\"", "weight = 2\nname = \"s1\"", 1);
    eventually(TAKEOVER_LIMIT, "the next one takes a change", || env.apply(&all, &weighed).is_ok());
    // `None` without a leader; the test compares answers of leaders.
    let mut drained = None;
    eventually(TAKEOVER_LIMIT, "a leader answers", || {
        drained = env.drained(&all);
        drained.is_some()
    });
    assert_eq!(drained.unwrap(), ["s1", "s2"]);
    eventually(TAKEOVER_LIMIT, "s2 is undrained", || env.run_at(&all, &["undrain", "s2"]).is_ok());
    let rest: Vec<u16> = all.into_iter().filter(|number| *number != leader).collect();
    eventually(TAKEOVER_LIMIT, "one of the others leads", || env.leader(&rest).is_some());

    // The fleet returns to one controller.
    let in_use = env.run(&["store", "copy", "--from", first_text, "--to", alone_text, "--replace"]).unwrap_err();
    assert!(in_use.contains("a controller uses this store"), "{in_use}");
    for controller in controllers.iter_mut().flatten() {
        assert!(controller.terminate(EXIT_TIMEOUT).unwrap().success());
    }
    env.run(&["store", "copy", "--from", first_text, "--to", alone_text, "--replace"]).unwrap();
    let _single = env.start_controller(&alone);
    eventually(TAKEOVER_LIMIT, "the drain is there still", || env.drained(&[1]) == Some(vec!["s1".to_owned()]));
    let shown = env.run_at(&[1], &["fleet", "show"]).unwrap();
    assert!(shown.trim().ends_with(weighed.trim()), "{shown}");

    // --controller-name is for a tunnel, or for a host that the certificate does not name.
    let named = ["--controller-name", "c1"];
    env.run_at(&[1], &[&["fleet", "show"][..], &named].concat()).unwrap();
    let refused = env.run_at(&[1], &["fleet", "show", "--controller-name", "c2"]).unwrap_err();
    let expected = format!("its certificate is for controller c1 at {CONTROLLER_ADDRESS}: expected one for c2");
    assert!(refused.contains(&expected), "{refused}");
}

#[test]
fn controller_rejected_by_etcd_reports_the_reason() {
    skip_if!(missing_testbed_rights());
    let env = TestEnv::start("ctldenied");
    let elsewhere = certificate_directory(&env.testbed).join("elsewhere");
    let foreign = issue(&authority(&elsewhere), &elsewhere, Role::Controller, "c1", None);
    let own = env.files(Role::Controller, "c1");
    let not_ours = CredentialFiles { ca: own.ca.clone(), ..foreign.clone() };
    let not_theirs = CredentialFiles { ca: foreign.ca.clone(), ..own.clone() };
    let endpoint = env.member.secure_endpoint();
    for (name, files, expected) in [
        ("foreign", not_ours, "etcd refuses our certificate, or that we show none"),
        ("misled", not_theirs, "its certificate is signed by no authority in `ca`"),
    ] {
        let file = env.write_etcd_config(name, 1, &files);
        let mut controller = env.start_controller(&file);
        let log = || fs::read_to_string(file.with_extension("log")).unwrap();
        let says = || {
            let log = log();
            log.contains("event=\"leader-unknown\"") && log.contains(&endpoint) && log.contains(expected)
        };
        eventually(TAKEOVER_LIMIT, expected, says);
        assert!(controller.terminate(EXIT_TIMEOUT).unwrap().success(), "{}", log());
        let doctor = env.doctor(&file);
        assert!(doctor.contains(expected), "{doctor}");
    }
    // The controller was not elected meanwhile. It is elected after its certificate was replaced by one that etcd
    // accepts.
    let file = env.write_etcd_config("renewed", 1, &CredentialFiles { ca: own.ca.clone(), ..foreign.clone() });
    let _controller = env.start_controller(&file);
    let log = || fs::read_to_string(file.with_extension("log")).unwrap();
    eventually(TAKEOVER_LIMIT, "it is refused", || log().contains("etcd refuses our certificate"));
    fs::copy(&own.certificate, &foreign.certificate).unwrap();
    fs::copy(&own.key, &foreign.key).unwrap();
    eventually(TAKEOVER_LIMIT, "it leads", || env.run_at(&[1], &["fleet", "show"]).is_ok());
}
