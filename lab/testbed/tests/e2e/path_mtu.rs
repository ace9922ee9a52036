//! A hop with a small MTU on the way to the client. Its ICMP errors go to the VIP and must reach the server that sent
//! the packet. Otherwise the connection hangs (RFC 1191; RFC 2923, Sect. 2.1).

use std::process::Command;

use coreward_testbed::addresses::SERVICE_ADDRESS;
use coreward_testbed::fleet::{Fleet, TestbedFleetOptions};
use coreward_testbed::nginx::{LARGE_FILE_BYTES, LARGE_FILE_PATH, NginxServer};
use coreward_testbed::{Testbed, TestbedOptions, counters, find_missing_testbed_rights, skip_if};

const CLIENT_ADDRESS_COUNT: u16 = 12;
const DOWNLOAD_ROUND_COUNT: usize = 5;

/// Downloads a file once from each of the client's addresses. The server remembers the MTU towards each address.
fn download_from_each_address(testbed: &Testbed) {
    for index in 0..CLIENT_ADDRESS_COUNT {
        let mut curl = Command::new("curl");
        curl.args(["-sS", "--max-time", "10", "--interface", &testbed.client_address(index).to_string()]);
        curl.arg(format!("http://{SERVICE_ADDRESS}{LARGE_FILE_PATH}"));
        let downloaded_files = testbed.run_command(testbed.client(), curl).unwrap().stdout;
        assert_eq!(downloaded_files.len(), LARGE_FILE_BYTES, "from {}", testbed.client_address(index));
    }
}

fn read_icmp_unreachable_counts(testbed: &Testbed) -> Vec<u64> {
    let unreachable_count =
        |number| counters::read_kernel_counters(testbed.server(number).unwrap()).unwrap()["IcmpInDestUnreachs"];
    testbed.server_numbers().into_iter().map(unreachable_count).collect()
}

fn assert_downloads_pass_small_mtu(instance: &str, client_timestamps: &str) {
    let testbed = Testbed::create(TestbedOptions {
        instance_name: instance.to_owned(),
        server_count: 3,
        load_balancer_count: 2,
        client_address_count: CLIENT_ADDRESS_COUNT,
        router_mtu: Some(1000),
        ..TestbedOptions::default()
    })
    .unwrap();
    testbed.client().set_sysctls(&[("ipv4/tcp_timestamps", client_timestamps)]).unwrap();
    // Without this setting, a server without ICMP errors would find the MTU by itself after some seconds.
    for number in testbed.server_numbers() {
        testbed.server(number).unwrap().set_sysctls(&[("ipv4/tcp_mtu_probing", "0")]).unwrap();
    }
    let _nginx_servers: Vec<NginxServer> =
        testbed.server_numbers().into_iter().map(|number| testbed.start_nginx(number).unwrap()).collect();
    let _fleet =
        Fleet::start(&testbed, TestbedFleetOptions { policy_name: "rr".to_owned(), ..TestbedFleetOptions::default() })
            .unwrap();
    // Repeat the downloads, because the hash chooses the server, and 12 connections all miss one of three servers once
    // in 43 runs.
    for _ in 0..DOWNLOAD_ROUND_COUNT {
        download_from_each_address(&testbed);
        if read_icmp_unreachable_counts(&testbed).iter().all(|errors| *errors > 0) {
            return;
        }
    }
    panic!("ICMP errors at servers: {:?}", read_icmp_unreachable_counts(&testbed));
}

#[test]
fn downloads_pass_a_hop_with_a_small_mtu() {
    skip_if!(find_missing_testbed_rights());
    assert_downloads_pass_small_mtu("mtu", "1");
}

#[test]
fn downloads_without_timestamps_pass_a_hop_with_a_small_mtu() {
    skip_if!(find_missing_testbed_rights());
    assert_downloads_pass_small_mtu("mtunots", "0");
}
