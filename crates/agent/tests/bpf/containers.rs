//! nginx in a network namespace of its own behind a bridge and nftables' DNAT, as Docker and kube-proxy make them.

use std::fs;
use std::net::Ipv4Addr;
use std::process::{Command, Stdio};

use coreward_agent::agent::Agent;
use coreward_testbed::process::Process;
use coreward_testbed::topology::{SERVICE, Testbed, skip_without_privilege};

use crate::support::{config, configuration, counter, get, testbed, wait_until};

const CONTAINER: Ipv4Addr = Ipv4Addr::new(172, 17, 0, 2);
const PORT: u16 = 8080;

/// nginx in a network namespace that goes with it.
fn start_container(testbed: &Testbed) -> anyhow::Result<Process> {
    let directory = testbed.directory().join("container");
    fs::create_dir_all(&directory)?;
    let at = directory.display();
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|kind| format!("{kind}_temp_path {at}/{kind}; "))
        .concat();
    let text = format!(
        "user root; daemon off; worker_processes 1; pid {at}/nginx.pid; error_log {at}/error.log; lock_file {at}/lock; \
         events {{ }} http {{ access_log off; {temporary} server {{ listen {PORT}; location / {{ return 200 \"contained\"; }} }} }}"
    );
    fs::write(directory.join("nginx.conf"), text)?;
    let mut command = Command::new("unshare");
    command.args(["--net", "nginx", "-c"]).arg(directory.join("nginx.conf")).arg("-e").arg(directory.join("error.log"));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let container = testbed.spawn(testbed.server(1)?, command)?;
    let pid = container.pid();
    let own = fs::read_link("/proc/self/ns/net")?;
    wait_until("a network namespace of its own", || {
        let namespace = fs::read_link(format!("/proc/{pid}/ns/net"))?;
        Ok(namespace != own && namespace != fs::read_link("/proc/thread-self/ns/net")?)
    })?;
    let wires = format!(
        "set -e
        ip link add br0 type bridge
        ip address add 172.17.0.1/16 dev br0
        ip link set br0 up
        ip link add port type veth peer name eth0 netns {pid}
        ip link set port master br0 up
        nsenter --net=/proc/{pid}/ns/net sh -c 'ip link set lo up; ip address add {CONTAINER}/16 dev eth0; ip link set eth0 up
            ip route add default via 172.17.0.1'
        sysctl -q -w net.ipv4.ip_forward=1
        nft add table ip nat
        nft 'add chain ip nat prerouting {{ type nat hook prerouting priority dstnat; }}'
        nft add rule ip nat prerouting ip daddr {} tcp dport {} dnat to {CONTAINER}:{PORT}",
        SERVICE.ip(),
        SERVICE.port()
    );
    let mut command = Command::new("sh");
    command.args(["-c", &wires]);
    testbed.run(testbed.server(1)?, command)?;
    Ok(container)
}

fn set_timestamps(testbed: &Testbed, container: &Process, value: u8) -> anyhow::Result<()> {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net=/proc/{}/ns/net", container.pid()));
    command.args(["sysctl", "-q", "-w", &format!("net.ipv4.tcp_timestamps={value}")]);
    testbed.run(testbed.server(1)?, command).map(drop)
}

#[test]
fn containers_are_stamped_if_their_clock_is_plain_and_named_if_not() -> anyhow::Result<()> {
    if skip_without_privilege("containers_are_stamped_if_their_clock_is_plain_and_named_if_not") {
        return Ok(());
    }
    let testbed = testbed("tcontainer")?;
    testbed.server(1)?.within(|| {
        let container = start_container(&testbed)?;
        let mut agent = Agent::start(config(&testbed))?;
        agent.configure(configuration(), &[]);
        let mut port = 20_000;
        let mut ask = || {
            port += 1;
            get(&testbed, "/", port)
        };
        wait_until("the container answers", || Ok(ask().is_ok()))?;

        set_timestamps(&testbed, &container, 1)?;
        let before = counter(&mut agent, "stamped");
        for _ in 0..8 {
            assert_eq!(ask()?, "contained");
        }
        assert_eq!(counter(&mut agent, "stamped"), before, "a random offset is no clock");
        agent.maintain();
        let named =
            |agent: &Agent| agent.warnings().iter().any(|warning| warning.contains("another network namespace"));
        assert!(named(&agent), "{:?}", agent.warnings());

        set_timestamps(&testbed, &container, 2)?;
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
fn handshakes_by_syn_cookies_are_of_no_other_namespace() -> anyhow::Result<()> {
    if skip_without_privilege("handshakes_by_syn_cookies_are_of_no_other_namespace") {
        return Ok(());
    }
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
