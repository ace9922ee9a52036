//! Every component has a certificate, and everything works as without certificates. An invalid certificate is rejected
//! with a message on both sides, while packets are still forwarded. With a valid certificate the component reconnects
//! by itself. No daemon keeps capabilities that it does not need, although root started all of them.

use std::path::{Path, PathBuf};

use coreward_metrics::metric_declarations::Component;
use coreward_testbed::fleet::{
    Fleet, TestbedFleetOptions, certificate_directory, credential_directory, issue_certificate,
};
use coreward_testbed::{DEFAULT_WAIT_TIMEOUT, Testbed, TestbedOptions, find_missing_testbed_rights, skip_if};
use coreward_tls::authority::{CertificateAuthority, CertificateValidity, DAY};
use coreward_tls::certificate::unix_now;
use coreward_tls::{FleetIdentity, FleetRole, IdentityName};

use crate::support::{
    assert_eventually, read_daemon_log, read_process_status_field, retained_capability_mask, send_requests,
};

fn parse_name(name: &str) -> IdentityName {
    name.parse().unwrap()
}

fn copy_certificates(source_directory: &Path, target_directory: &Path) {
    for file in ["ca.crt", "own.crt", "own.key"] {
        std::fs::copy(source_directory.join(file), target_directory.join(file)).unwrap();
    }
}

/// Certificates that differ from the agent's valid certificate in role, name or fleet. Each entry has the certificate's
/// role, name and fleet, and the messages in the logs of the controller and of the agent.
const WRONG_CERTIFICATES: [(FleetRole, &str, &str, &str, &str); 5] = [
    (
        FleetRole::Viewer,
        "s1",
        "testbed",
        "reason=\"wrong_role\" error=its certificate is for viewer s1: expected agent or lb",
        "the peer rejects our certificate: wrong fleet, role or name",
    ),
    (
        FleetRole::Agent,
        "s2",
        "testbed",
        "reason=\"wrong_name\" error=the certificate is for agent s2, not for agent s1: expected its own name",
        "error=\"the certificate is for agent s2, not for agent s1",
    ),
    (
        FleetRole::Lb,
        "lb2",
        "testbed",
        "reason=\"wrong_role\" error=the certificate is for lb lb2: expected agent",
        "error=\"the certificate is for lb lb2: expected agent",
    ),
    (
        FleetRole::Controller,
        "c2",
        "testbed",
        "reason=\"wrong_role\" error=its certificate is for controller c2: expected agent or lb",
        "the peer rejects our certificate: wrong fleet, role or name",
    ),
    (
        FleetRole::Agent,
        "other",
        "other",
        "reason=\"rejected_by_peer\" error=the peer rejects our certificate",
        "its certificate is for controller controller of fleet testbed: expected fleet other",
    ),
];

fn build_expired_validity() -> CertificateValidity {
    let now = unix_now();
    CertificateValidity { not_before: now - 2 * DAY, not_after: now - DAY }
}

/// Issues a certificate that is signed by the testbed's authority, and returns the directory of its files.
fn issue_testbed_certificate(
    testbed: &Testbed,
    role: FleetRole,
    subject_name: &str,
    fleet_name: &str,
    validity: CertificateValidity,
) -> PathBuf {
    issue_certificate(testbed, role, subject_name, &parse_name(fleet_name), validity).unwrap()
}

/// Issues a certificate for the agent that is signed by an unknown authority, and returns the directory of its files.
fn issue_foreign_certificate(testbed: &Testbed) -> PathBuf {
    let foreign_directory = certificate_directory(testbed).join("foreign");
    let foreign_authority = CertificateAuthority::init(&foreign_directory, &parse_name("testbed"), 30 * DAY).unwrap();
    let directory = certificate_directory(testbed).join("elsewhere");
    let agent_identity = FleetIdentity { fleet: parse_name("testbed"), role: FleetRole::Agent, name: parse_name("s1") };
    foreign_authority
        .issue_certificate(&agent_identity, &[], CertificateValidity::from_now(DAY))
        .unwrap()
        .write_files(&directory, &foreign_authority)
        .unwrap();
    std::fs::copy(certificate_directory(testbed).join("ca.crt"), directory.join("ca.crt")).unwrap();
    directory
}

fn assert_only_needed_capabilities(fleet: &mut Fleet) {
    for (name, daemon) in
        [("controller", Component::Controller), ("lb1", Component::Lb), ("agent-s1", Component::Agent)]
    {
        let daemon_pid = fleet.daemon_process(name).unwrap().pid();
        for capability_field in ["CapEff:", "CapPrm:", "CapBnd:"] {
            assert_eq!(
                read_process_status_field(daemon_pid, capability_field),
                format!("{:016x}", retained_capability_mask(daemon)),
                "{name} {capability_field}"
            );
        }
        assert_eq!(read_process_status_field(daemon_pid, "NoNewPrivs:"), "1", "{name}");
    }
}

/// Restarts the agent with the certificate in `directory`. Waits until the controller's log contains the first of
/// `messages`, and the agent's log the second.
fn assert_agent_is_rejected(testbed: &Testbed, fleet: &mut Fleet, directory: &Path, messages: [&str; 2]) {
    fleet.kill_daemon("agent-s1").unwrap();
    let log_lengths = ["controller", "agent-s1"].map(|daemon| read_daemon_log(testbed, daemon, 0).len());
    copy_certificates(directory, &credential_directory(testbed, FleetRole::Agent, "s1"));
    fleet.restart_daemon(testbed, "agent-s1").unwrap();
    for ((daemon, log_length), message) in ["controller", "agent-s1"].into_iter().zip(log_lengths).zip(messages) {
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, message, || {
            read_daemon_log(testbed, daemon, log_length).contains(message)
        });
    }
}

/// Asserts that an agent with an expired certificate reconnects without a restart when it gets a valid one.
fn assert_agent_reconnects_with_valid_certificate(testbed: &Testbed, fleet: &mut Fleet) {
    fleet.kill_daemon("agent-s1").unwrap();
    let agent_log_length = read_daemon_log(testbed, "agent-s1", 0).len();
    issue_testbed_certificate(testbed, FleetRole::Agent, "s1", "testbed", build_expired_validity());
    fleet.restart_daemon(testbed, "agent-s1").unwrap();
    // Wait for this message before the files change again. A daemon that starts while its files are written finds a key
    // that does not match the certificate, and ends (a unit restarts it).
    let expiry_message = "the peer rejects our certificate: by the peer's clock it has expired";
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, expiry_message, || {
        read_daemon_log(testbed, "agent-s1", agent_log_length).contains(expiry_message)
    });
    issue_testbed_certificate(testbed, FleetRole::Agent, "s1", "testbed", CertificateValidity::from_now(DAY));
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the agent is back", || {
        read_daemon_log(testbed, "agent-s1", agent_log_length).contains("event=\"controller-connected\"")
    });
    fleet.wait_until_ready(testbed).unwrap();
}

/// Asserts that a process with an agent's certificate cannot open a load balancer's stream, which contains all cookie
/// keys.
fn assert_agent_certificate_is_rejected_for_lb(testbed: &Testbed, fleet: &mut Fleet) {
    fleet.kill_daemon("lb1").unwrap();
    let controller_log_length = read_daemon_log(testbed, "controller", 0).len();
    copy_certificates(
        &credential_directory(testbed, FleetRole::Agent, "s1"),
        &credential_directory(testbed, FleetRole::Lb, "lb1"),
    );
    fleet.restart_daemon(testbed, "lb1").unwrap();
    let rejection_message = "peer=agent s1 at ";
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, rejection_message, || {
        let new_log_lines = read_daemon_log(testbed, "controller", controller_log_length);
        new_log_lines.contains(rejection_message)
            && new_log_lines.contains("reason=\"wrong_role\" error=the certificate is for agent s1: expected lb")
    });
}

#[test]
fn daemons_reject_peers_with_wrong_certificates() {
    skip_if!(find_missing_testbed_rights());
    let options = TestbedOptions { instance_name: "tls".to_owned(), server_count: 1, ..Default::default() };
    let testbed = Testbed::create(options).unwrap();
    let _nginx = testbed.start_nginx(1).unwrap();
    let mut fleet = Fleet::start(&testbed, TestbedFleetOptions { uses_tls: true, ..Default::default() }).unwrap();
    send_requests(&testbed, 10);

    assert_only_needed_capabilities(&mut fleet);
    for (role, subject_name, fleet_name, controller_message, agent_message) in WRONG_CERTIFICATES {
        let directory =
            issue_testbed_certificate(&testbed, role, subject_name, fleet_name, CertificateValidity::from_now(DAY));
        assert_agent_is_rejected(&testbed, &mut fleet, &directory, [controller_message, agent_message]);
    }
    assert_agent_is_rejected(
        &testbed,
        &mut fleet,
        &issue_foreign_certificate(&testbed),
        [
            "reason=\"unknown_authority\" error=its certificate is signed by no authority in `ca`",
            "the peer rejects our certificate: its signer is not in the peer's `ca`",
        ],
    );
    assert_agent_is_rejected(
        &testbed,
        &mut fleet,
        &issue_testbed_certificate(&testbed, FleetRole::Agent, "old", "testbed", build_expired_validity()),
        [
            "reason=\"expired\" error=its certificate has expired",
            "the peer rejects our certificate: by the peer's clock it has expired",
        ],
    );
    send_requests(&testbed, 10);
    assert_agent_reconnects_with_valid_certificate(&testbed, &mut fleet);
    assert_agent_certificate_is_rejected_for_lb(&testbed, &mut fleet);
    send_requests(&testbed, 10);
}
