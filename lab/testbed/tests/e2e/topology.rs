//! The testbed itself: hosts reach each other, RSS delivers as predicted, and nothing is left behind.

use std::io::{BufRead as _, BufReader};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use coreward_model::FourTuple;
use coreward_model::rss::{IndirectionTable, RssConfig, RssKey};
use coreward_testbed::addresses::{DEVICE, SERVICE_ADDRESS, VIP, server_address};
use coreward_testbed::instance::find_remains;
use coreward_testbed::rss_emulation::{ReceiveQueueRecorder, attach_xdp_pass, read_registers, write_registers};
use coreward_testbed::{Testbed, TestbedOptions, counters, missing_testbed_rights, nginx, skip_if};
use nix::unistd::{Pid, getpgid};

fn options(instance: &str, servers: u16) -> TestbedOptions {
    TestbedOptions { instance: instance.to_owned(), servers, ..TestbedOptions::default() }
}

fn curl(testbed: &Testbed, path: &str, arguments: &[&str]) -> anyhow::Result<Vec<u8>> {
    let mut curl = Command::new("curl");
    curl.args(["-sS", "--max-time", "10"]).args(arguments).arg(format!("http://{SERVICE_ADDRESS}{path}"));
    Ok(testbed.run(testbed.client(), curl)?.stdout)
}

#[test]
fn hosts_reach_each_other_and_nginx_serves() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let mut testbed = Testbed::create(options("ttopology", 2))?;

    attach_xdp_pass(testbed.load_balancer(1)?, DEVICE).context("the load balancer's device must take native XDP")?;

    let nginx = testbed.start_nginx(1)?;
    assert_eq!(nginx.workers().len(), 4);
    // Otherwise all processes get SIGHUP when a shell ends while one process of the testbed is stopped.
    let pid = Pid::from_raw(nginx.pid() as i32);
    assert_eq!(getpgid(Some(pid))?, pid);
    testbed.route_vip_to_server_1(testbed.client())?;
    let large = curl(&testbed, nginx::LARGE_FILE, &[])?;
    assert_eq!(large.len(), nginx::LARGE_FILE_BYTES);
    let who = String::from_utf8(curl(&testbed, nginx::WORKER_PATH, &[])?)?;
    let (server, pid) = who.trim().split_once(' ').context("server and pid")?;
    assert_eq!(server, "1");
    assert!(nginx.workers().contains(&pid.parse()?), "{who:?} is none of {:?}", nginx.workers());

    let added = testbed.add_server()?;
    assert_eq!((added, testbed.server_numbers()), (3, vec![1, 2, 3]));
    // No process listens: the host itself refuses the connection (curl's exit code 7); silence would be a timeout (28).
    let mut added_host = Command::new("curl");
    added_host.args(["-sS", "--max-time", "5", &format!("http://{}/", server_address(added))]);
    let refused = testbed.run(testbed.client(), added_host).unwrap_err().to_string();
    assert!(refused.contains("exit status: 7"), "{refused}");
    testbed.remove_server(2)?;
    assert_eq!(testbed.server_numbers(), [1, 3]);
    assert!(testbed.server(2).is_err() && testbed.server(0).is_err());
    Ok(())
}

/// Opens a connection per source port. Asserts that Toeplitz hash and table predict each one's receive queue.
fn assert_queues_as_predicted(
    testbed: &Testbed,
    queues: &ReceiveQueueRecorder,
    rss: &RssConfig,
    first_port: u16,
) -> anyhow::Result<()> {
    let mut used = vec![false; usize::from(testbed.options().cores)];
    for port in first_port..first_port + 32 {
        curl(testbed, nginx::WORKER_PATH, &["--local-port", &port.to_string()])?;
        let tuple = FourTuple::ipv4((testbed.client_ipv4_address(0), port), (VIP, SERVICE_ADDRESS.port()));
        let hash = rss.key.toeplitz(&tuple.bytes());
        let predicted = rss.indirection_table.queue(hash);
        assert_eq!(queues.queue_and_hash(&tuple)?, Some((predicted, hash)), "source port {port}");
        used[usize::from(predicted)] = true;
    }
    assert!(used.iter().all(|used| *used), "32 flows did not use all queues: {used:?}");
    Ok(())
}

#[test]
fn emulated_rss_delivers_32_of_32_flows_on_the_predicted_queue() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let testbed = Testbed::create(options("trss", 1))?;
    let _nginx = testbed.start_nginx(1)?;
    testbed.route_vip_to_server_1(testbed.client())?;
    let queues = ReceiveQueueRecorder::start(testbed.server(1)?, DEVICE)?;
    let registers = testbed.emulated_rss_path(1);

    let fresh = read_registers(&registers)?;
    assert_eq!(fresh.indirection_table.queues()[..6], [0, 1, 2, 3, 0, 1]);
    assert_queues_as_predicted(&testbed, &queues, &fresh, 20_000)?;

    let set = RssConfig { key: RssKey::microsoft(), indirection_table: IndirectionTable::balanced(7, 256, 4)? };
    write_registers(&registers, &set)?;
    assert_eq!(read_registers(&registers)?, set);
    assert_queues_as_predicted(&testbed, &queues, &set, 21_000)
}

#[test]
fn new_nics_have_different_rss_keys() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let testbed = Testbed::create(options("tkeys", 2))?;
    let key = |number| -> anyhow::Result<_> { Ok(read_registers(&testbed.emulated_rss_path(number))?.key) };
    assert_ne!(key(1)?, key(2)?);
    Ok(())
}

/// Lets the load balancers' kernels route packets for the VIP to server 1, without coreward.
fn route_at_load_balancers(testbed: &Testbed) -> anyhow::Result<()> {
    for number in testbed.load_balancer_numbers() {
        let load_balancer = testbed.load_balancer(number)?;
        load_balancer.set_sysctls(&[
            ("ipv4/ip_forward", "1"),
            ("ipv4/conf/all/send_redirects", "0"),
            (&format!("ipv4/conf/{DEVICE}/send_redirects"), "0"),
        ])?;
        testbed.route_vip_to_server_1(load_balancer)?;
    }
    Ok(())
}

/// Returns the number of packets that the kernel of each load balancer has routed.
fn routed_packets(testbed: &Testbed) -> anyhow::Result<Vec<u64>> {
    let numbers = testbed.load_balancer_numbers();
    let of = |number| anyhow::Ok(counters::read(testbed.load_balancer(number)?)?["IpForwDatagrams"]);
    numbers.into_iter().map(of).collect()
}

#[test]
fn connections_spread_over_announced_load_balancers() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let mut testbed = Testbed::create(TestbedOptions { load_balancers: 2, ..options("tecmp", 1) })?;
    let _nginx = testbed.start_nginx(1)?;
    route_at_load_balancers(&testbed)?;
    let ask_often = |testbed: &Testbed| (0..32).try_for_each(|_| curl(testbed, nginx::WORKER_PATH, &[]).map(drop));
    ask_often(&testbed)?;
    let both = routed_packets(&testbed)?;
    // With 32 connections one load balancer gets none once in 2^31 runs.
    assert!(both.iter().all(|packets| *packets > 0), "{both:?}");

    testbed.route_vips_to_load_balancers(&[2])?;
    ask_often(&testbed)?;
    let second = routed_packets(&testbed)?;
    assert!(second[0] == both[0] && second[1] > both[1], "{both:?}, then {second:?}");

    assert_eq!(testbed.add_load_balancer()?, 3);
    testbed.remove_load_balancer(2)?;
    assert_eq!(testbed.load_balancer_numbers(), [1, 3]);
    // The client is not notified: packets to a load balancer without power are lost, not refused.
    let lost = curl(&testbed, nginx::WORKER_PATH, &["--connect-timeout", "1"]).unwrap_err().to_string();
    assert!(lost.contains("exit status: 28"), "{lost}");
    testbed.route_vips_to_load_balancers(&[1])?;
    ask_often(&testbed)?;
    let none = testbed.route_vips_to_load_balancers(&[]).unwrap_err().to_string();
    assert!(none.contains("at least one"), "{none}");
    Ok(())
}

#[test]
fn router_with_a_small_mtu_sends_icmp_to_the_server() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let testbed = Testbed::create(TestbedOptions { router_mtu: Some(1000), ..options("tmtu", 1) })?;
    let _nginx = testbed.start_nginx(1)?;
    route_at_load_balancers(&testbed)?;
    assert_eq!(curl(&testbed, nginx::LARGE_FILE, &[])?.len(), nginx::LARGE_FILE_BYTES);
    let reported = counters::read(testbed.server(1)?)?["IcmpInDestUnreachs"];
    assert!(reported > 0, "no ICMP error reached the server");
    Ok(())
}

const OWNER_VARIABLE: &str = "COREWARD_TESTBED_OWNER";
const KILLED_INSTANCE: &str = "tkilled";

/// Creates a testbed, reports it, and waits to be killed; the next test runs this in a separate process.
#[test]
#[ignore = "started by the next test"]
fn own_testbed_until_killed() -> anyhow::Result<()> {
    if std::env::var_os(OWNER_VARIABLE).is_none() {
        return Ok(());
    }
    let testbed = Testbed::create(options(KILLED_INSTANCE, 1))?;
    let nginx = testbed.start_nginx(1)?;
    // println! is not used, because the test runner would capture it.
    std::io::Write::write_all(&mut std::io::stdout(), format!("ready {}\n", nginx.workers()[0]).as_bytes())?;
    std::thread::sleep(Duration::from_secs(60));
    Ok(())
}

/// Returns whether a process has not ended. An ended process has no namespace, even before wait(2).
fn is_running(pid: u32) -> bool {
    std::fs::metadata(format!("/proc/{pid}/ns/net")).is_ok()
}

#[test]
fn killed_testbed_is_removed_by_the_next() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    // The test's name is its path without the executable's.
    let (_, module) = module_path!().split_once("::").context("a module")?;
    let mut owner = Command::new(std::env::current_exe()?)
        .args(["--ignored", "--exact", &format!("{module}::own_testbed_until_killed")])
        .env(OWNER_VARIABLE, "1")
        .stdout(Stdio::piped())
        .spawn()?;
    let mut lines = BufReader::new(owner.stdout.take().context("stdout")?).lines();
    let worker: u32 = loop {
        let line = lines.next().context("the owner ended early")??;
        if let Some((_, worker)) = line.split_once("ready ") {
            break worker.parse()?;
        }
    };
    let living = Testbed::create(options(KILLED_INSTANCE, 1)).unwrap_err().to_string();
    assert!(living.ends_with(&format!("{KILLED_INSTANCE} is in use by process {}", owner.id())), "{living}");

    owner.kill()?;
    owner.wait()?;
    // nginx's master ends with its owner. The workers do not, and the master could not signal them.
    assert!(is_running(worker));
    drop(Testbed::create(options(KILLED_INSTANCE, 1))?);
    assert!(!is_running(worker));
    assert_eq!(find_remains(KILLED_INSTANCE), Vec::<PathBuf>::new());
    Ok(())
}

#[test]
fn addresses_match_the_documentation() {
    assert_eq!(server_address(3), Ipv4Addr::new(10, 1, 1, 3));
    assert_eq!(SERVICE_ADDRESS, SocketAddrV4::new(Ipv4Addr::new(10, 200, 0, 1), 80));
}

#[test]
fn impossible_testbeds_are_rejected() {
    let refused = |options| Testbed::create(options).unwrap_err().to_string();
    let error = refused(TestbedOptions { cores: 0, ..TestbedOptions::default() });
    assert_eq!(error, "0 cores in a testbed: expected 1 to 64");
    let error = refused(TestbedOptions { servers: 251, ..TestbedOptions::default() });
    assert_eq!(error, "251 servers in a testbed: expected 0 to 250");
}
