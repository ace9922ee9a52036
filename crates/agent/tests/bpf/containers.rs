//! nginx in a network namespace of its own behind a bridge and nftables' DNAT, as Docker and kube-proxy make them.

use std::process::Command;

use coreward_agent::agent::Agent;
use coreward_testbed::{missing_testbed_rights, skip_if};

use crate::support::{config, configuration, counter, get, testbed, wait_until};

#[test]
fn containers_are_stamped_with_a_plain_clock_and_reported_otherwise() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let testbed = testbed("tcontainer")?;
    testbed.server(1)?.within(|| {
        let container = testbed.start_container(1)?;
        let mut agent = Agent::start(config(&testbed))?;
        agent.configure(configuration(), &[]);
        let mut port = 20_000;
        let mut ask = || {
            port += 1;
            get(&testbed, "/", port)
        };
        wait_until("the container answers", || Ok(ask().is_ok()))?;

        container.set_sysctl(&testbed, "net.ipv4.tcp_timestamps", 1)?;
        let before = counter(&mut agent, "stamped");
        for _ in 0..8 {
            assert_eq!(ask()?, "contained");
        }
        assert_eq!(counter(&mut agent, "stamped"), before, "a random offset is no clock");
        agent.maintain();
        let named =
            |agent: &Agent| agent.warnings().iter().any(|warning| warning.contains("another network namespace"));
        assert!(named(&agent), "{:?}", agent.warnings());

        container.set_sysctl(&testbed, "net.ipv4.tcp_timestamps", 2)?;
        let before =
            ["egress_forwarded", "stamped", "restored", "egress_foreign_clock"].map(|name| counter(&mut agent, name));
        for _ in 0..8 {
            assert_eq!(ask()?, "contained");
        }
        let after =
            ["egress_forwarded", "stamped", "restored", "egress_foreign_clock"].map(|name| counter(&mut agent, name));
        // Each SYN that is sent again is one more.
        assert!((8..16).contains(&(after[0] - before[0])), "handshakes: {before:?} {after:?}");
        // Each connection: a SYN-ACK, an answer, an end; and what the client sends after the handshake.
        assert!(after[1] - before[1] >= 3 * 8 && after[2] - before[2] >= 2 * 8, "{before:?} {after:?}");
        assert_eq!(after[3], before[3]);
        agent.detach()?;
        drop(container);
        Ok(())
    })
}

#[test]
fn syn_cookie_handshakes_are_not_of_another_namespace() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let testbed = testbed("tsyncookie")?;
    let _nginx = testbed.start_nginx(1)?;
    testbed.server(1)?.within(|| {
        let mut agent = Agent::start(config(&testbed))?;
        agent.configure(configuration(), &[]);
        let mut always = Command::new("sysctl");
        always.args(["-q", "-w", "net.ipv4.tcp_syncookies=2"]);
        testbed.run(testbed.server(1)?, always)?;
        wait_until("nginx answers", || Ok(get(&testbed, "/", 20_000).is_ok()))?;
        let before = counter(&mut agent, "stamped");
        for port in 20_001..20_009 {
            get(&testbed, "/", port)?;
        }
        assert!(counter(&mut agent, "stamped") - before >= 2 * 8);
        assert_eq!(counter(&mut agent, "egress_forwarded"), 0);
        agent.detach()
    })
}
