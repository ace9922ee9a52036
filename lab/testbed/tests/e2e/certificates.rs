//! Every component has a certificate, and everything works as without certificates. An invalid certificate is rejected
//! with a message on both sides, while packets are still forwarded. With a valid certificate the component reconnects
//! by itself. No daemon keeps capabilities that it does not need, although root started all of them.

use std::path::Path;

use coreward_metrics::table::Component;
use coreward_testbed::fleet::{Fleet, FleetOptions, certificate_directory, credential_directory, issue_certificate};
use coreward_testbed::{TIMEOUT, Testbed, TestbedOptions, missing_testbed_rights, skip_if};
use coreward_tls::authority::{Authority, DAY, Validity};
use coreward_tls::certificate::unix_now;
use coreward_tls::{Identity, Name, Role};

use crate::support::{daemon_log, eventually, process_status_field, retained_capabilities, send_requests};

fn parse_name(name: &str) -> Name {
    name.parse().unwrap()
}

fn copy_certificates(source_directory: &Path, target_directory: &Path) {
    for file in ["ca.crt", "own.crt", "own.key"] {
        std::fs::copy(source_directory.join(file), target_directory.join(file)).unwrap();
    }
}

#[test]
fn daemons_reject_peers_with_wrong_certificates() {
    skip_if!(missing_testbed_rights());
    let options = TestbedOptions { instance: "tls".to_owned(), servers: 1, ..Default::default() };
    let testbed = Testbed::create(options).unwrap();
    let _nginx = testbed.start_nginx(1).unwrap();
    let mut fleet = Fleet::start(&testbed, FleetOptions { uses_tls: true, ..Default::default() }).unwrap();
    send_requests(&testbed, 10);

    for (name, daemon) in
        [("controller", Component::Controller), ("lb1", Component::Lb), ("agent-s1", Component::Agent)]
    {
        let daemon_pid = fleet.daemon(name).unwrap().pid();
        for capability_field in ["CapEff:", "CapPrm:", "CapBnd:"] {
            assert_eq!(
                process_status_field(daemon_pid, capability_field),
                format!("{:016x}", retained_capabilities(daemon)),
                "{name} {capability_field}"
            );
        }
        assert_eq!(process_status_field(daemon_pid, "NoNewPrivs:"), "1", "{name}");
    }

    // Each case differs from the agent's valid certificate in role, name, fleet, signer or validity.
    let foreign_directory = certificate_directory(&testbed).join("foreign");
    let foreign_authority = Authority::init(&foreign_directory, &parse_name("testbed"), 30 * DAY).unwrap();
    let now = unix_now();
    let (current_validity, expired_validity) =
        (Validity::from_now(DAY), Validity { not_before: now - 2 * DAY, not_after: now - DAY });
    let issue_by_own_authority = |role, subject_name: &str, fleet: &str, validity| {
        issue_certificate(&testbed, role, subject_name, &parse_name(fleet), validity).unwrap()
    };
    let issue_by_foreign_authority = || {
        let directory = certificate_directory(&testbed).join("elsewhere");
        let agent_identity = Identity { fleet: parse_name("testbed"), role: Role::Agent, name: parse_name("s1") };
        foreign_authority
            .issue(&agent_identity, &[], current_validity)
            .unwrap()
            .write_files(&directory, &foreign_authority)
            .unwrap();
        std::fs::copy(certificate_directory(&testbed).join("ca.crt"), directory.join("ca.crt")).unwrap();
        directory
    };
    let wrong_certificates = [
        (
            issue_by_own_authority(Role::Viewer, "s1", "testbed", current_validity),
            "reason=\"wrong_role\" error=its certificate is for viewer s1: expected agent or lb",
            "the peer refuses our certificate: wrong fleet, role or name",
        ),
        (
            issue_by_own_authority(Role::Agent, "s2", "testbed", current_validity),
            "reason=\"wrong_name\" error=the certificate is for agent s2, not for agent s1: expected its own name",
            "error=\"the certificate is for agent s2, not for agent s1",
        ),
        (
            issue_by_own_authority(Role::Lb, "lb2", "testbed", current_validity),
            "reason=\"wrong_role\" error=the certificate is for lb lb2: expected agent",
            "error=\"the certificate is for lb lb2: expected agent",
        ),
        (
            issue_by_own_authority(Role::Controller, "c2", "testbed", current_validity),
            "reason=\"wrong_role\" error=its certificate is for controller c2: expected agent or lb",
            "the peer refuses our certificate: wrong fleet, role or name",
        ),
        (
            issue_by_own_authority(Role::Agent, "other", "other", current_validity),
            "reason=\"refused_by_peer\" error=the peer refuses our certificate",
            "its certificate is for controller controller of fleet testbed: expected fleet other",
        ),
        (
            issue_by_foreign_authority(),
            "reason=\"unknown_authority\" error=its certificate is signed by no authority in `ca`",
            "the peer refuses our certificate: its signer is not in the peer's `ca`",
        ),
        (
            issue_by_own_authority(Role::Agent, "old", "testbed", expired_validity),
            "reason=\"expired\" error=its certificate has expired",
            "the peer refuses our certificate: by the peer's clock it has expired",
        ),
    ];
    let agent_directory = credential_directory(&testbed, Role::Agent, "s1");
    for (wrong_directory, controller_says, agent_says) in wrong_certificates {
        fleet.kill_daemon("agent-s1").unwrap();
        let (controller_log_length, agent_log_length) =
            (daemon_log(&testbed, "controller", 0).len(), daemon_log(&testbed, "agent-s1", 0).len());
        copy_certificates(&wrong_directory, &agent_directory);
        fleet.restart_daemon(&testbed, "agent-s1").unwrap();
        eventually(*TIMEOUT, controller_says, || {
            daemon_log(&testbed, "controller", controller_log_length).contains(controller_says)
        });
        eventually(*TIMEOUT, agent_says, || daemon_log(&testbed, "agent-s1", agent_log_length).contains(agent_says));
    }
    send_requests(&testbed, 10);
    // An agent whose certificate has expired reconnects without a restart when it gets a valid one.
    fleet.kill_daemon("agent-s1").unwrap();
    let agent_log_length = daemon_log(&testbed, "agent-s1", 0).len();
    issue_by_own_authority(Role::Agent, "s1", "testbed", expired_validity);
    fleet.restart_daemon(&testbed, "agent-s1").unwrap();
    // Wait for this message before the files change again. A daemon that starts while its files are written finds a key
    // that does not match the certificate, and ends (a unit restarts it).
    let expiry_message = "the peer refuses our certificate: by the peer's clock it has expired";
    eventually(*TIMEOUT, expiry_message, || {
        daemon_log(&testbed, "agent-s1", agent_log_length).contains(expiry_message)
    });
    issue_by_own_authority(Role::Agent, "s1", "testbed", current_validity);
    eventually(*TIMEOUT, "the agent is back", || {
        daemon_log(&testbed, "agent-s1", agent_log_length).contains("event=\"controller-connected\"")
    });
    fleet.wait_until_ready(&testbed).unwrap();

    // An agent's certificate must not open a load balancer's stream, on which all keys are sent.
    fleet.kill_daemon("lb1").unwrap();
    let controller_log_length = daemon_log(&testbed, "controller", 0).len();
    copy_certificates(&agent_directory, &credential_directory(&testbed, Role::Lb, "lb1"));
    fleet.restart_daemon(&testbed, "lb1").unwrap();
    let rejection_message = "peer=agent s1 at ";
    eventually(*TIMEOUT, rejection_message, || {
        let new_log_lines = daemon_log(&testbed, "controller", controller_log_length);
        new_log_lines.contains(rejection_message)
            && new_log_lines.contains("reason=\"wrong_role\" error=the certificate is for agent s1: expected lb")
    });
    send_requests(&testbed, 10);
}
