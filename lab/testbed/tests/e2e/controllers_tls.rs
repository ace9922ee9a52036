//! Several controllers with TLS everywhere, including client certificates for etcd and https for users. Records,
//! including drains, survive a killed leader, and are copied from one store to the other and back.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use coreward_etcd::local::{ClientTlsFiles, LocalEtcdMember};
use coreward_testbed::addresses::CONTROLLER_ADDRESS;
use coreward_testbed::fleet::{certificate_directory, controller_address, coreward_binary_path};
use coreward_testbed::process::TestbedProcess;
use coreward_testbed::{Testbed, TestbedOptions, find_missing_testbed_rights, skip_if};
use coreward_tls::authority::{CertificateAuthority, CertificateValidity, DAY};
use coreward_tls::{FleetIdentity, FleetRole, TlsCredentialFiles, read_certificates};
use nix::sys::signal::Signal;

use crate::support::assert_eventually;

/// Maximum time until another controller becomes the leader. It is a multiple of the lease's duration, to allow for
/// slow machines.
const LEADER_TAKEOVER_TIMEOUT: Duration = Duration::from_secs(90);
/// Maximum time until a process ends, which may first write to etcd. The time is long, because it only prevents a hang.
const EXIT_TIMEOUT: Duration = Duration::from_secs(60);
const FLEET_DOCUMENT: &str = "[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\n\
                        [[server]]\nname = \"s1\"\naddress = \"10.1.1.1\"\n[[server]]\nname = \"s2\"\naddress = \
                        \"10.1.1.2\"\n";

/// Testbed with etcd and certificates for controllers. Fields are dropped in the order of their declaration, the
/// testbed last.
struct ControllersTlsEnv {
    _etcd_process: TestbedProcess,
    etcd_member: LocalEtcdMember,
    operator_credentials: TlsCredentialFiles,
    testbed: Testbed,
}

fn create_authority(directory: &Path) -> CertificateAuthority {
    CertificateAuthority::init(directory, &"testbed".parse().unwrap(), 30 * DAY).unwrap()
}

fn issue_certificate(
    authority: &CertificateAuthority,
    directory: &Path,
    role: FleetRole,
    name: &str,
    address: Option<&str>,
) -> TlsCredentialFiles {
    let identity = FleetIdentity { fleet: "testbed".parse().unwrap(), role, name: name.parse().unwrap() };
    let certificate_addresses: Vec<String> = address.into_iter().map(str::to_owned).collect();
    let bundle_directory = directory.join(format!("{role}-{name}"));
    authority
        .issue_certificate(&identity, &certificate_addresses, CertificateValidity::from_now(DAY))
        .unwrap()
        .write_files(&bundle_directory, authority)
        .unwrap();
    let bundle_file_path = |name: &str| bundle_directory.join(name);
    TlsCredentialFiles {
        ca_path: bundle_file_path("ca.crt"),
        certificate_path: bundle_file_path("own.crt"),
        key_path: bundle_file_path("own.key"),
    }
}

fn tls_config_table(
    TlsCredentialFiles { ca_path: ca, certificate_path: certificate, key_path: key }: &TlsCredentialFiles,
) -> String {
    format!("ca = {ca:?}\ncertificate = {certificate:?}\nkey = {key:?}\n")
}

fn controller_api_url(number: u16) -> String {
    format!("https://{CONTROLLER_ADDRESS}:{}", 7410 + number)
}

impl ControllersTlsEnv {
    fn start(instance: &str) -> Self {
        let options = TestbedOptions { instance_name: instance.to_owned(), server_count: 1, ..Default::default() };
        let testbed = Testbed::create(options).unwrap();
        let directory = certificate_directory(&testbed);
        let authority = create_authority(&directory);
        let controller_address = CONTROLLER_ADDRESS.to_string();
        let etcd_credentials =
            issue_certificate(&authority, &directory, FleetRole::Controller, "etcd1", Some(&controller_address));
        for name in ["c1", "c2", "c3"] {
            issue_certificate(&authority, &directory, FleetRole::Controller, name, Some(&controller_address));
        }
        let operator_credentials = issue_certificate(&authority, &directory, FleetRole::Operator, "ann", None);
        let [member] = &LocalEtcdMember::local_cluster_members(1, CONTROLLER_ADDRESS.into(), 2379)[..] else {
            unreachable!("one")
        };
        let TlsCredentialFiles { ca_path: ca, certificate_path: certificate, key_path: key } = etcd_credentials;
        let client_tls = ClientTlsFiles { ca_file: ca, certificate_file: certificate, key_file: key };
        let command =
            member.build_secure_start_command(std::slice::from_ref(member), &testbed.directory(), &client_tls);
        let spawn_result = testbed.spawn(testbed.controller(), command);
        let etcd_process = spawn_result.expect("etcd cannot be started: `scripts/install run` installs it");
        Self { _etcd_process: etcd_process, etcd_member: member.clone(), operator_credentials, testbed }
    }

    fn credential_file_paths(&self, role: FleetRole, name: &str) -> TlsCredentialFiles {
        let credential_file_path =
            |file: &str| certificate_directory(&self.testbed).join(format!("{role}-{name}")).join(file);
        TlsCredentialFiles {
            ca_path: credential_file_path("ca.crt"),
            certificate_path: credential_file_path("own.crt"),
            key_path: credential_file_path("own.key"),
        }
    }

    fn write_controller_config(&self, name: &str, number: u16, extra_config: &str) -> PathBuf {
        let config_path = self.testbed.directory().join(format!("{name}.toml"));
        let own_tls_table = tls_config_table(&self.credential_file_paths(FleetRole::Controller, &format!("c{number}")));
        let (listen, api) = (controller_address(number), controller_api_url(number).replace("https://", ""));
        fs::write(
            &config_path,
            format!("listen = \"{listen}\"\napi = \"{api}\"\n{extra_config}\n[tls]\n{own_tls_table}"),
        )
        .unwrap();
        config_path
    }

    /// Writes the configuration file of a single controller, which has its own store.
    fn write_store_config(&self) -> PathBuf {
        let store_path = self.testbed.directory().join("alone.redb");
        self.write_controller_config("alone", 1, &format!("store = {store_path:?}\n"))
    }

    /// Writes the configuration file of one of several controllers. It authenticates to etcd with `own_credentials`.
    fn write_etcd_config(&self, name: &str, number: u16, own_credentials: &TlsCredentialFiles) -> PathBuf {
        let etcd_endpoint = self.etcd_member.secure_endpoint();
        let token_directory = self.testbed.directory();
        let etcd_config = format!(
            "token_directory = {token_directory:?}\n[etcd]\nendpoints = [\"{etcd_endpoint}\"]\nlease = \
             \"4s\"\n[etcd.tls]\n{}",
            tls_config_table(own_credentials)
        );
        self.write_controller_config(name, number, &etcd_config)
    }

    fn start_controller(&self, config_path: &Path) -> TestbedProcess {
        let log_file = File::options().create(true).append(true).open(config_path.with_extension("log")).unwrap();
        let mut command = Command::new(coreward_binary_path().unwrap());
        command.arg("controller").arg("--config").arg(config_path);
        command.stdin(Stdio::null()).stdout(log_file.try_clone().unwrap()).stderr(log_file);
        self.testbed.spawn(self.testbed.controller(), command).unwrap()
    }

    fn run_coreward(&self, arguments: &[&str]) -> Result<String, String> {
        let mut command = Command::new(coreward_binary_path().unwrap());
        command.args(arguments);
        let output = self.testbed.run_command(self.testbed.controller(), command);
        output.map(|output| String::from_utf8(output.stdout).unwrap()).map_err(|error| format!("{error:#}"))
    }

    /// Runs `coreward doctor`, asserts that it finds a fault, and returns its output.
    fn run_failing_doctor(&self, config_path: &Path) -> String {
        let mut command = Command::new("sh");
        command
            .args(["-c", "\"$0\" doctor --config \"$1\" || true"])
            .arg(coreward_binary_path().unwrap())
            .arg(config_path);
        String::from_utf8(self.testbed.run_command(self.testbed.controller(), command).unwrap().stdout).unwrap()
    }

    /// Runs `coreward` with these arguments against these controllers by https, with an operator's certificate.
    fn run_coreward_as_operator(&self, controllers: &[u16], arguments: &[&str]) -> Result<String, String> {
        let api_urls: Vec<String> = controllers.iter().map(|number| controller_api_url(*number)).collect();
        let TlsCredentialFiles { ca_path: ca, certificate_path: certificate, key_path: key } =
            &self.operator_credentials;
        let [ca, certificate, key] = [ca, certificate, key].map(|file| file.to_str().unwrap());
        let api_urls = api_urls.join(",");
        let contact_options = ["--controller", &api_urls, "--ca", ca, "--certificate", certificate, "--key", key];
        self.run_coreward(&[arguments, &contact_options].concat())
    }

    fn apply_document(&self, controllers: &[u16], document: &str) -> Result<String, String> {
        let document_path = self.testbed.directory().join("applied.toml");
        fs::write(&document_path, document).unwrap();
        self.run_coreward_as_operator(controllers, &["apply", "--yes", document_path.to_str().unwrap()])
    }

    /// Returns the names of the servers that are drained by `coreward drain`, or `None` if no controller is the leader.
    fn query_servers_drained_by_command(&self, controllers: &[u16]) -> Option<Vec<String>> {
        let text = self.run_coreward_as_operator(controllers, &["status", "--format", "json"]).ok()?;
        let status: serde_json::Value = serde_json::from_str(&text).unwrap();
        let servers = status["servers"].as_array().unwrap().iter();
        let drained_servers = servers.filter(|server| server["state_reason"] == "by `coreward drain`");
        let mut server_names: Vec<String> =
            drained_servers.map(|server| server["name"].as_str().unwrap().to_owned()).collect();
        // Sort the names, because the output is sorted by the servers' random ids.
        server_names.sort();
        Some(server_names)
    }

    /// Queries each of these controllers. Returns the leader's number and the rejections of the other controllers.
    /// Returns `None` unless there is exactly one leader.
    fn query_leader_and_rejections(&self, controllers: &[u16]) -> Option<(u16, Vec<String>)> {
        let (mut leaders, mut rejections) = (Vec::new(), Vec::new());
        for number in controllers {
            match self.run_coreward_as_operator(&[*number], &["fleet", "show"]) {
                Ok(_) => leaders.push(*number),
                Err(error) => rejections.push(error),
            }
        }
        if let [leader] = leaders[..] { Some((leader, rejections)) } else { None }
    }
}

/// Waits until all followers name the leader and the address of its API. Returns the leader's number.
fn wait_until_followers_name_leader(env: &ControllersTlsEnv, controller_numbers: &[u16]) -> u16 {
    let mut leader_number = 0;
    assert_eventually(LEADER_TAKEOVER_TIMEOUT, "the others name the leader", || {
        let Some((leader, rejections)) = env.query_leader_and_rejections(controller_numbers) else { return false };
        leader_number = leader;
        let expected_hint =
            format!("{} (API: {}) does", controller_address(leader_number), controller_api_url(leader_number));
        rejections.iter().all(|rejection| rejection.contains(&expected_hint))
    });
    leader_number
}

/// Asserts that a follower rejects the operator's certificate while it is revoked.
fn assert_follower_rejects_revoked_certificate(
    env: &ControllersTlsEnv,
    follower_number: u16,
    follower: &TestbedProcess,
    config_path: &Path,
) {
    let text = fs::read_to_string(config_path).unwrap();
    let operator_fingerprint = read_certificates(&env.operator_credentials.certificate_path).unwrap()[0].fingerprint;
    let write_and_reload = |text: &str| {
        fs::write(config_path, text).unwrap();
        follower.send_signal(Signal::SIGHUP).unwrap();
    };
    let is_operator_revoked =
        || env.run_coreward_as_operator(&[follower_number], &["status"]).is_err_and(|error| error.contains("revoked"));
    write_and_reload(&format!("revoked_certificates = [\"{operator_fingerprint}\"]\n{text}"));
    assert_eventually(LEADER_TAKEOVER_TIMEOUT, "it is rejected", is_operator_revoked);
    write_and_reload(&text);
    assert_eventually(LEADER_TAKEOVER_TIMEOUT, "it is no longer rejected", || !is_operator_revoked());
}

/// Waits until a leader answers, and returns the names of the servers that are drained by `coreward drain`.
fn wait_for_drained_servers(env: &ControllersTlsEnv, controller_numbers: &[u16]) -> Vec<String> {
    // Repeat the query, because the test compares only leaders' answers.
    let mut drained_servers = None;
    assert_eventually(LEADER_TAKEOVER_TIMEOUT, "a leader answers", || {
        drained_servers = env.query_servers_drained_by_command(controller_numbers);
        drained_servers.is_some()
    });
    drained_servers.unwrap()
}

/// Asserts that the state cannot be copied from etcd while controllers run. Then stops the controllers, and copies the
/// state to the store of a single controller.
fn copy_state_from_etcd_to_store(
    env: &ControllersTlsEnv,
    controllers: &mut [Option<TestbedProcess>],
    etcd_config_path: &Path,
    store_config_path: &Path,
) {
    let [etcd_config, store_config] = [etcd_config_path, store_config_path].map(|path| path.to_str().unwrap());
    let store_in_use_error =
        env.run_coreward(&["store", "copy", "--from", etcd_config, "--to", store_config, "--replace"]).unwrap_err();
    assert!(store_in_use_error.contains("a controller uses this store"), "{store_in_use_error}");
    for controller in controllers.iter_mut().flatten() {
        assert!(controller.terminate(EXIT_TIMEOUT).unwrap().success());
    }
    env.run_coreward(&["store", "copy", "--from", etcd_config, "--to", store_config, "--replace"]).unwrap();
}

/// Asserts that the controller's certificate must have the name given by `--controller-name`. The option is for a
/// tunnel, or for a host that the certificate does not name.
fn assert_controller_name_is_verified(env: &ControllersTlsEnv) {
    let name_option = ["--controller-name", "c1"];
    env.run_coreward_as_operator(&[1], &[&["fleet", "show"][..], &name_option].concat()).unwrap();
    let wrong_name_error =
        env.run_coreward_as_operator(&[1], &["fleet", "show", "--controller-name", "c2"]).unwrap_err();
    let expected_error = format!("its certificate is for controller c1 at {CONTROLLER_ADDRESS}: expected one for c2");
    assert!(wrong_name_error.contains(&expected_error), "{wrong_name_error}");
}

/// Starts a single controller, drains a server, and replaces the controller by several, which take over its state.
fn replace_single_controller(
    env: &ControllersTlsEnv,
    store_config_path: &Path,
    etcd_config_paths: &[PathBuf],
) -> Vec<Option<TestbedProcess>> {
    let [store_config, etcd_config] =
        [store_config_path, etcd_config_paths[0].as_path()].map(|path| path.to_str().unwrap());
    let mut single_controller = env.start_controller(store_config_path);
    assert_eventually(LEADER_TAKEOVER_TIMEOUT, "the document is in force", || {
        env.apply_document(&[1], FLEET_DOCUMENT).is_ok()
    });
    env.run_coreward_as_operator(&[1], &["drain", "s1", "--force"]).unwrap();
    assert_eq!(env.query_servers_drained_by_command(&[1]).unwrap(), ["s1"]);
    assert!(single_controller.terminate(EXIT_TIMEOUT).unwrap().success());
    let copy_output = env.run_coreward(&["store", "copy", "--from", store_config, "--to", etcd_config]).unwrap();
    assert!(copy_output.contains("2 servers, 1 services"), "{copy_output}");

    etcd_config_paths.iter().map(|file| Some(env.start_controller(file))).collect()
}

/// Kills the leader. Asserts that the next leader accepts a change, and that both servers are still drained.
fn assert_drains_outlive_leader(
    env: &ControllersTlsEnv,
    controller_numbers: &[u16],
    mut leader: TestbedProcess,
    changed_document: &str,
) {
    leader.send_signal(Signal::SIGKILL).unwrap();
    leader.wait_for_exit(EXIT_TIMEOUT).unwrap();
    assert_eventually(LEADER_TAKEOVER_TIMEOUT, "the next one takes a change", || {
        env.apply_document(controller_numbers, changed_document).is_ok()
    });
    assert_eq!(wait_for_drained_servers(env, controller_numbers), ["s1", "s2"]);
    assert_eventually(LEADER_TAKEOVER_TIMEOUT, "s2 is undrained", || {
        env.run_coreward_as_operator(controller_numbers, &["undrain", "s2"]).is_ok()
    });
}

#[test]
fn commands_find_leader_and_drains_survive_its_death() {
    skip_if!(find_missing_testbed_rights());
    let env = ControllersTlsEnv::start("ctltls");
    let controller_numbers = [1, 2, 3];
    let store_config_path = env.write_store_config();
    let etcd_config_paths = controller_numbers.map(|number| {
        let own_credentials = env.credential_file_paths(FleetRole::Controller, &format!("c{number}"));
        env.write_etcd_config(&format!("c{number}"), number, &own_credentials)
    });

    let mut controller_processes = replace_single_controller(&env, &store_config_path, &etcd_config_paths);
    assert_eventually(LEADER_TAKEOVER_TIMEOUT, "the drain came along", || {
        env.query_servers_drained_by_command(&controller_numbers) == Some(vec!["s1".to_owned()])
    });
    assert_eventually(LEADER_TAKEOVER_TIMEOUT, "s2 is drained", || {
        env.run_coreward_as_operator(&controller_numbers, &["drain", "s2", "--force"]).is_ok()
    });

    let leader_number = wait_until_followers_name_leader(&env, &controller_numbers);
    let follower_number = controller_numbers.into_iter().find(|number| *number != leader_number).unwrap();
    let follower_index = usize::from(follower_number) - 1;
    let follower = controller_processes[follower_index].as_ref().unwrap();
    assert_follower_rejects_revoked_certificate(&env, follower_number, follower, &etcd_config_paths[follower_index]);

    let changed_document = FLEET_DOCUMENT.replacen("name = \"s1\"", "weight = 2\nname = \"s1\"", 1);
    let leader = controller_processes[usize::from(leader_number) - 1].take().unwrap();
    assert_drains_outlive_leader(&env, &controller_numbers, leader, &changed_document);
    let other_controllers: Vec<u16> =
        controller_numbers.into_iter().filter(|number| *number != leader_number).collect();
    assert_eventually(LEADER_TAKEOVER_TIMEOUT, "one of the others leads", || {
        env.query_leader_and_rejections(&other_controllers).is_some()
    });

    copy_state_from_etcd_to_store(&env, &mut controller_processes, &etcd_config_paths[0], &store_config_path);
    let _single_controller = env.start_controller(&store_config_path);
    assert_eventually(LEADER_TAKEOVER_TIMEOUT, "the drain is there still", || {
        env.query_servers_drained_by_command(&[1]) == Some(vec!["s1".to_owned()])
    });
    let shown_document = env.run_coreward_as_operator(&[1], &["fleet", "show"]).unwrap();
    assert!(shown_document.trim().ends_with(changed_document.trim()), "{shown_document}");
    assert_controller_name_is_verified(&env);
}

fn read_controller_log(config_path: &Path) -> String {
    fs::read_to_string(config_path.with_extension("log")).unwrap()
}

/// Asserts that a controller with this configuration and `coreward doctor` both report the reason why the controller
/// and etcd reject each other.
fn assert_rejection_is_reported(env: &ControllersTlsEnv, config_path: &Path, expected_reason: &str) {
    let etcd_endpoint = env.etcd_member.secure_endpoint();
    let mut controller = env.start_controller(config_path);
    let is_reported = || {
        let log_text = read_controller_log(config_path);
        log_text.contains("event=\"leader-unknown\"")
            && log_text.contains(&etcd_endpoint)
            && log_text.contains(expected_reason)
    };
    assert_eventually(LEADER_TAKEOVER_TIMEOUT, expected_reason, is_reported);
    assert!(controller.terminate(EXIT_TIMEOUT).unwrap().success(), "{}", read_controller_log(config_path));
    let doctor_output = env.run_failing_doctor(config_path);
    assert!(doctor_output.contains(expected_reason), "{doctor_output}");
}

#[test]
fn controller_rejected_by_etcd_reports_the_reason() {
    skip_if!(find_missing_testbed_rights());
    let env = ControllersTlsEnv::start("ctldenied");
    let foreign_directory = certificate_directory(&env.testbed).join("elsewhere");
    let foreign_credentials =
        issue_certificate(&create_authority(&foreign_directory), &foreign_directory, FleetRole::Controller, "c1", None);
    let own_credentials = env.credential_file_paths(FleetRole::Controller, "c1");
    let credentials_untrusted_by_etcd =
        TlsCredentialFiles { ca_path: own_credentials.ca_path.clone(), ..foreign_credentials.clone() };
    let credentials_distrusting_etcd =
        TlsCredentialFiles { ca_path: foreign_credentials.ca_path.clone(), ..own_credentials.clone() };
    for (name, files, expected) in [
        ("foreign", credentials_untrusted_by_etcd, "etcd rejects our certificate, or that we show none"),
        ("misled", credentials_distrusting_etcd, "its certificate is signed by no authority in `ca`"),
    ] {
        assert_rejection_is_reported(&env, &env.write_etcd_config(name, 1, &files), expected);
    }
    // The controller was not elected meanwhile. It is elected after its certificate is replaced by one that etcd
    // accepts.
    let config_path = env.write_etcd_config(
        "renewed",
        1,
        &TlsCredentialFiles { ca_path: own_credentials.ca_path.clone(), ..foreign_credentials.clone() },
    );
    let _controller = env.start_controller(&config_path);
    assert_eventually(LEADER_TAKEOVER_TIMEOUT, "it is rejected", || {
        read_controller_log(&config_path).contains("etcd rejects our certificate")
    });
    fs::copy(&own_credentials.certificate_path, &foreign_credentials.certificate_path).unwrap();
    fs::copy(&own_credentials.key_path, &foreign_credentials.key_path).unwrap();
    assert_eventually(LEADER_TAKEOVER_TIMEOUT, "it leads", || {
        env.run_coreward_as_operator(&[1], &["fleet", "show"]).is_ok()
    });
}
