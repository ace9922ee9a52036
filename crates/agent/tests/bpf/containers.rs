//! Tests nginx in a separate network namespace, behind a bridge and nftables' DNAT, as Docker and kube-proxy set it up.

use std::process::Command;

use coreward_agent::agent::Agent;
use coreward_testbed::{find_missing_testbed_rights, skip_if};

use crate::support::{agent_config, create_testbed, http_get, reported_counter, test_agent_configuration, wait_until};

const PACKET_COUNTER_NAMES: [&str; 4] = ["egress_forwarded", "stamped", "restored", "egress_foreign_clock"];

/// Asserts that the counters in [`PACKET_COUNTER_NAMES`] have increased as expected after eight stamped connections.
fn expect_eight_stamped_connections(counters_before: [u64; 4], counters_after: [u64; 4]) {
    // A repeated SYN adds one more handshake.
    assert!(
        (8..16).contains(&(counters_after[0] - counters_before[0])),
        "handshakes: {counters_before:?} {counters_after:?}"
    );
    // Each connection has a SYN-ACK, a reply and an end. The client's packets after the handshake are restored.
    assert!(
        counters_after[1] - counters_before[1] >= 3 * 8 && counters_after[2] - counters_before[2] >= 2 * 8,
        "{counters_before:?} {counters_after:?}"
    );
    assert_eq!(counters_after[3], counters_before[3]);
}

#[test]
fn container_connections_are_stamped_only_without_timestamp_offsets() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let testbed = create_testbed("tcontainer")?;
    testbed.server(1)?.run_within(|| {
        let container = testbed.start_container(1)?;
        let mut agent = Agent::start(agent_config(&testbed))?;
        agent.apply_configuration(test_agent_configuration(), &[]);
        let mut port = 20_000;
        let mut request_container = || {
            port += 1;
            http_get(&testbed, "/", port)
        };
        wait_until("the container answers", || Ok(request_container().is_ok()))?;

        container.set_sysctl(&testbed, "net.ipv4.tcp_timestamps", 1)?;
        let initial_stamped_count = reported_counter(&mut agent, "stamped");
        for _ in 0..8 {
            assert_eq!(request_container()?, "contained");
        }
        assert_eq!(reported_counter(&mut agent, "stamped"), initial_stamped_count, "a random offset is no clock");
        agent.run_maintenance();
        let warns_of_other_namespace = |agent: &Agent| {
            agent.maintenance_warnings().iter().any(|warning| warning.contains("another network namespace"))
        };
        assert!(warns_of_other_namespace(&agent), "{:?}", agent.maintenance_warnings());

        container.set_sysctl(&testbed, "net.ipv4.tcp_timestamps", 2)?;
        let counters_before = PACKET_COUNTER_NAMES.map(|name| reported_counter(&mut agent, name));
        for _ in 0..8 {
            assert_eq!(request_container()?, "contained");
        }
        expect_eight_stamped_connections(
            counters_before,
            PACKET_COUNTER_NAMES.map(|name| reported_counter(&mut agent, name)),
        );
        agent.detach_programs()?;
        drop(container);
        Ok(())
    })
}

#[test]
fn syn_cookie_handshakes_cause_no_network_namespace_warning() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let testbed = create_testbed("tsyncookie")?;
    let _nginx = testbed.start_nginx(1)?;
    testbed.server(1)?.run_within(|| {
        let mut agent = Agent::start(agent_config(&testbed))?;
        agent.apply_configuration(test_agent_configuration(), &[]);
        let mut enable_syn_cookies = Command::new("sysctl");
        enable_syn_cookies.args(["-q", "-w", "net.ipv4.tcp_syncookies=2"]);
        testbed.run_command(testbed.server(1)?, enable_syn_cookies)?;
        wait_until("nginx answers", || Ok(http_get(&testbed, "/", 20_000).is_ok()))?;
        let initial_stamped_count = reported_counter(&mut agent, "stamped");
        for port in 20_001..20_009 {
            http_get(&testbed, "/", port)?;
        }
        assert!(reported_counter(&mut agent, "stamped") - initial_stamped_count >= 2 * 8);
        assert_eq!(reported_counter(&mut agent, "egress_forwarded"), 0);
        agent.detach_programs()
    })
}
