//! Test of the testbed itself. Hosts reach each other, RSS delivers as predicted, and nothing is left behind.

use std::io::{BufRead as _, BufReader};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use coreward_model::FourTuple;
use coreward_model::rss::{IndirectionTable, RssConfig, RssKey};
use coreward_testbed::addresses::{FIRST_IPV4_VIP, HOST_DEVICE, SERVICE_ADDRESS, server_address};
use coreward_testbed::instance::find_leftover_paths;
use coreward_testbed::rss_emulation::{
    ReceiveQueueRecorder, attach_xdp_pass_program, read_rss_registers, write_rss_registers,
};
use coreward_testbed::{Testbed, TestbedOptions, counters, find_missing_testbed_rights, nginx, skip_if};
use nix::unistd::{Pid, getpgid};

fn build_testbed_options(instance: &str, server_count: u16) -> TestbedOptions {
    TestbedOptions { instance_name: instance.to_owned(), server_count, ..TestbedOptions::default() }
}

fn fetch_with_curl(testbed: &Testbed, path: &str, arguments: &[&str]) -> anyhow::Result<Vec<u8>> {
    let mut curl = Command::new("curl");
    curl.args(["-sS", "--max-time", "10"]).args(arguments).arg(format!("http://{SERVICE_ADDRESS}{path}"));
    Ok(testbed.run_command(testbed.client(), curl)?.stdout)
}

#[test]
fn hosts_reach_each_other_and_nginx_serves() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let mut testbed = Testbed::create(build_testbed_options("ttopology", 2))?;

    attach_xdp_pass_program(testbed.load_balancer(1)?, HOST_DEVICE)
        .context("the load balancer's device must take native XDP")?;

    let nginx = testbed.start_nginx(1)?;
    assert_eq!(nginx.worker_pids().len(), 4);
    // Without its own group, each process would get SIGHUP when a shell ends while one process of the testbed is
    // stopped.
    let nginx_pid = Pid::from_raw(nginx.master_pid() as i32);
    assert_eq!(getpgid(Some(nginx_pid))?, nginx_pid);
    testbed.route_vip_to_server_1(testbed.client())?;
    let large_file = fetch_with_curl(&testbed, nginx::LARGE_FILE_PATH, &[])?;
    assert_eq!(large_file.len(), nginx::LARGE_FILE_BYTES);
    let worker_response = String::from_utf8(fetch_with_curl(&testbed, nginx::WORKER_IDENTITY_PATH, &[])?)?;
    let (server, pid) = worker_response.trim().split_once(' ').context("server and pid")?;
    assert_eq!(server, "1");
    assert!(nginx.worker_pids().contains(&pid.parse()?), "{worker_response:?} is none of {:?}", nginx.worker_pids());

    let added_server = testbed.add_server()?;
    assert_eq!((added_server, testbed.server_numbers()), (3, vec![1, 2, 3]));
    // No process listens, so the host itself refuses the connection (curl's exit code 7). Silence would be a timeout
    // (28).
    let mut curl_command = Command::new("curl");
    curl_command.args(["-sS", "--max-time", "5", &format!("http://{}/", server_address(added_server))]);
    let refusal = testbed.run_command(testbed.client(), curl_command).unwrap_err().to_string();
    assert!(refusal.contains("exit status: 7"), "{refusal}");
    testbed.remove_server(2)?;
    assert_eq!(testbed.server_numbers(), [1, 3]);
    assert!(testbed.server(2).is_err() && testbed.server(0).is_err());
    Ok(())
}

/// Opens one connection per source port. Asserts that each arrives in the receive queue that Toeplitz hash and
/// indirection table predict.
fn assert_queues_match_prediction(
    testbed: &Testbed,
    queues: &ReceiveQueueRecorder,
    rss: &RssConfig,
    first_port: u16,
) -> anyhow::Result<()> {
    let mut used_queues = vec![false; usize::from(testbed.options().core_count)];
    for port in first_port..first_port + 32 {
        fetch_with_curl(testbed, nginx::WORKER_IDENTITY_PATH, &["--local-port", &port.to_string()])?;
        let four_tuple =
            FourTuple::ipv4((testbed.client_ipv4_address(0), port), (FIRST_IPV4_VIP, SERVICE_ADDRESS.port()));
        let toeplitz_hash = rss.key.toeplitz_hash(&four_tuple.bytes());
        let predicted_queue = rss.indirection_table.queue_for_hash(toeplitz_hash);
        assert_eq!(
            queues.find_queue_and_hash(&four_tuple)?,
            Some((predicted_queue, toeplitz_hash)),
            "source port {port}"
        );
        used_queues[usize::from(predicted_queue)] = true;
    }
    assert!(used_queues.iter().all(|is_used| *is_used), "32 flows did not use all queues: {used_queues:?}");
    Ok(())
}

#[test]
fn emulated_rss_delivers_all_flows_to_the_predicted_queues() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let testbed = Testbed::create(build_testbed_options("trss", 1))?;
    let _nginx = testbed.start_nginx(1)?;
    testbed.route_vip_to_server_1(testbed.client())?;
    let queue_recorder = ReceiveQueueRecorder::start(testbed.server(1)?, HOST_DEVICE)?;
    let registers_path = testbed.emulated_rss_pin_path(1);

    let initial_rss = read_rss_registers(&registers_path)?;
    assert_eq!(initial_rss.indirection_table.queue_by_entry()[..6], [0, 1, 2, 3, 0, 1]);
    assert_queues_match_prediction(&testbed, &queue_recorder, &initial_rss, 20_000)?;

    let changed_rss = RssConfig {
        key: RssKey::microsoft_verification_key(),
        indirection_table: IndirectionTable::draw_balanced_entries(7, 256, 4)?,
    };
    write_rss_registers(&registers_path, &changed_rss)?;
    assert_eq!(read_rss_registers(&registers_path)?, changed_rss);
    assert_queues_match_prediction(&testbed, &queue_recorder, &changed_rss, 21_000)
}

#[test]
fn new_nics_have_different_rss_keys() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let testbed = Testbed::create(build_testbed_options("tkeys", 2))?;
    let read_rss_key =
        |number| -> anyhow::Result<_> { Ok(read_rss_registers(&testbed.emulated_rss_pin_path(number))?.key) };
    assert_ne!(read_rss_key(1)?, read_rss_key(2)?);
    Ok(())
}

/// Makes the load balancers' kernels route packets for the VIP to server 1, without coreward.
fn route_by_load_balancer_kernels(testbed: &Testbed) -> anyhow::Result<()> {
    for number in testbed.load_balancer_numbers() {
        let lb_host = testbed.load_balancer(number)?;
        lb_host.set_sysctls(&[
            ("ipv4/ip_forward", "1"),
            ("ipv4/conf/all/send_redirects", "0"),
            (&format!("ipv4/conf/{HOST_DEVICE}/send_redirects"), "0"),
        ])?;
        testbed.route_vip_to_server_1(lb_host)?;
    }
    Ok(())
}

/// Returns the number of packets that the kernel of each load balancer has routed.
fn read_routed_packet_counts(testbed: &Testbed) -> anyhow::Result<Vec<u64>> {
    let lb_numbers = testbed.load_balancer_numbers();
    let routed_packet_count =
        |number| anyhow::Ok(counters::read_kernel_counters(testbed.load_balancer(number)?)?["IpForwDatagrams"]);
    lb_numbers.into_iter().map(routed_packet_count).collect()
}

#[test]
fn connections_are_spread_over_the_next_hops() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let mut testbed = Testbed::create(TestbedOptions { load_balancer_count: 2, ..build_testbed_options("tecmp", 1) })?;
    let _nginx = testbed.start_nginx(1)?;
    route_by_load_balancer_kernels(&testbed)?;
    let send_many_requests = |testbed: &Testbed| {
        (0..32).try_for_each(|_| fetch_with_curl(testbed, nginx::WORKER_IDENTITY_PATH, &[]).map(drop))
    };
    send_many_requests(&testbed)?;
    let packet_counts_with_both_hops = read_routed_packet_counts(&testbed)?;
    // With 32 connections one load balancer gets none once in 2^31 runs.
    assert!(packet_counts_with_both_hops.iter().all(|packets| *packets > 0), "{packet_counts_with_both_hops:?}");

    testbed.route_vips_to_load_balancers(&[2])?;
    send_many_requests(&testbed)?;
    let packet_counts_with_second_hop = read_routed_packet_counts(&testbed)?;
    assert!(
        packet_counts_with_second_hop[0] == packet_counts_with_both_hops[0]
            && packet_counts_with_second_hop[1] > packet_counts_with_both_hops[1],
        "{packet_counts_with_both_hops:?}, then {packet_counts_with_second_hop:?}"
    );

    assert_eq!(testbed.add_load_balancer()?, 3);
    testbed.remove_load_balancer(2)?;
    assert_eq!(testbed.load_balancer_numbers(), [1, 3]);
    // The client is not notified, so packets to a load balancer without power are lost, not refused.
    let timeout_error =
        fetch_with_curl(&testbed, nginx::WORKER_IDENTITY_PATH, &["--connect-timeout", "1"]).unwrap_err().to_string();
    assert!(timeout_error.contains("exit status: 28"), "{timeout_error}");
    testbed.route_vips_to_load_balancers(&[1])?;
    send_many_requests(&testbed)?;
    let empty_route_error = testbed.route_vips_to_load_balancers(&[]).unwrap_err().to_string();
    assert!(empty_route_error.contains("at least one"), "{empty_route_error}");
    Ok(())
}

#[test]
fn router_with_a_small_mtu_sends_icmp_errors_to_the_server() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let testbed = Testbed::create(TestbedOptions { router_mtu: Some(1000), ..build_testbed_options("tmtu", 1) })?;
    let _nginx = testbed.start_nginx(1)?;
    route_by_load_balancer_kernels(&testbed)?;
    assert_eq!(fetch_with_curl(&testbed, nginx::LARGE_FILE_PATH, &[])?.len(), nginx::LARGE_FILE_BYTES);
    let unreachable_count_before = counters::read_kernel_counters(testbed.server(1)?)?["IcmpInDestUnreachs"];
    assert!(unreachable_count_before > 0, "no ICMP error reached the server");
    Ok(())
}

const OWNER_PROCESS_ENV_VARIABLE: &str = "COREWARD_TESTBED_OWNER";
const KILLED_INSTANCE_NAME: &str = "tkilled";

/// Creates a testbed, reports this, and waits to be killed. The next test runs this function in a separate process.
#[test]
#[ignore = "started by the next test"]
fn own_testbed_until_killed() -> anyhow::Result<()> {
    if std::env::var_os(OWNER_PROCESS_ENV_VARIABLE).is_none() {
        return Ok(());
    }
    let testbed = Testbed::create(build_testbed_options(KILLED_INSTANCE_NAME, 1))?;
    let nginx = testbed.start_nginx(1)?;
    // println! is not used, because the test runner would capture it.
    std::io::Write::write_all(&mut std::io::stdout(), format!("ready {}\n", nginx.worker_pids()[0]).as_bytes())?;
    std::thread::sleep(Duration::from_secs(60));
    Ok(())
}

/// Returns whether a process has not ended. A process that has ended has no namespace, even before wait(2).
fn is_process_running(pid: u32) -> bool {
    std::fs::metadata(format!("/proc/{pid}/ns/net")).is_ok()
}

#[test]
fn killed_testbed_is_removed_by_next_testbed_of_same_name() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    // The test's name is its path without the executable's name.
    let (_, module) = module_path!().split_once("::").context("a module")?;
    let mut owner_process = Command::new(std::env::current_exe()?)
        .args(["--ignored", "--exact", &format!("{module}::own_testbed_until_killed")])
        .env(OWNER_PROCESS_ENV_VARIABLE, "1")
        .stdout(Stdio::piped())
        .spawn()?;
    let mut owner_lines = BufReader::new(owner_process.stdout.take().context("stdout")?).lines();
    let worker_pid: u32 = loop {
        let owner_line = owner_lines.next().context("the owner ended early")??;
        if let Some((_, worker)) = owner_line.split_once("ready ") {
            break worker.parse()?;
        }
    };
    let name_in_use_error = Testbed::create(build_testbed_options(KILLED_INSTANCE_NAME, 1)).unwrap_err().to_string();
    assert!(
        name_in_use_error.ends_with(&format!("{KILLED_INSTANCE_NAME} is in use by process {}", owner_process.id())),
        "{name_in_use_error}"
    );

    owner_process.kill()?;
    owner_process.wait()?;
    // nginx's master ends with its owner. The workers do not, and the master could not signal them.
    assert!(is_process_running(worker_pid));
    drop(Testbed::create(build_testbed_options(KILLED_INSTANCE_NAME, 1))?);
    assert!(!is_process_running(worker_pid));
    assert_eq!(find_leftover_paths(KILLED_INSTANCE_NAME), Vec::<PathBuf>::new());
    Ok(())
}

#[test]
fn host_addresses_are_as_documented() {
    assert_eq!(server_address(3), Ipv4Addr::new(10, 1, 1, 3));
    assert_eq!(SERVICE_ADDRESS, SocketAddrV4::new(Ipv4Addr::new(10, 200, 0, 1), 80));
}

#[test]
fn testbed_options_outside_limits_are_rejected() {
    let creation_error_text = |options| Testbed::create(options).unwrap_err().to_string();
    let error = creation_error_text(TestbedOptions { core_count: 0, ..TestbedOptions::default() });
    assert_eq!(error, "0 cores in a testbed: expected 1 to 64");
    let error = creation_error_text(TestbedOptions { server_count: 251, ..TestbedOptions::default() });
    assert_eq!(error, "251 servers in a testbed: expected 0 to 250");
}
