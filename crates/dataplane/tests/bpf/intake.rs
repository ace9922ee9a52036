//! Tests of `bpf/orchestrate/intake.bpf.c`, which redirects datagrams to AF_XDP sockets (`BPF_PROG_TEST_RUN`).
//!
//! As the tests have no AF_XDP socket, a datagram that would be redirected is counted as `passed_no_socket`.

use std::net::{Ipv4Addr, SocketAddrV4};

use coreward_dataplane::intake::program::{COUNTER_NAMES, RequestIntakeProgram};
use coreward_dataplane::mac::MacAddress;
use coreward_dataplane::test_run;

use crate::support::balancer::XDP_PASS;
use crate::support::{MORE_FRAGMENTS_FLAG, UdpDatagram, missing_bpf_rights, ones_complement_sum, skip_if};

const CLIENT_ENDPOINT: (Ipv4Addr, u16) = (Ipv4Addr::new(192, 0, 2, 9), 40_000);
const SERVICE_ENDPOINT: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 0, 0, 1), 4000);
const OTHER_SERVICE_ENDPOINT: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 0, 0, 1), 4001);
/// Offset of the IP header in a frame, in bytes. The frames have no IP options.
const IP_HEADER_OFFSET: usize = 14;
const UDP_HEADER_OFFSET: usize = IP_HEADER_OFFSET + 20;
const UDP_CHECKSUM_OFFSET: usize = UDP_HEADER_OFFSET + 6;
/// Maximum payload of a datagram with an MTU of 1500, in bytes.
const MAX_UDP_PAYLOAD_BYTES: usize = 1472;

const NO_SOCKET_COUNTER: Option<&str> = Some("passed_no_socket");

fn load_intake_program() -> RequestIntakeProgram {
    let listeners = [SERVICE_ENDPOINT, OTHER_SERVICE_ENDPOINT].map(|(address, port)| SocketAddrV4::new(address, port));
    RequestIntakeProgram::load(MacAddress([0; 6]), &listeners).unwrap()
}

/// Runs the program on `frame`. Asserts that only `counter` has increased, or no counter if `counter` is `None`.
fn expect_pass_with_counter(program: &RequestIntakeProgram, frame: &[u8], counter: Option<&str>, case: &str) {
    let counters_before = program.counters().unwrap();
    let outcome = test_run::run_program(program.program_fd(), frame, 1).unwrap();
    let counters_after = program.counters().unwrap();
    let increased_counters: Vec<_> = (0..COUNTER_NAMES.len())
        .filter(|counter_index| counters_after[*counter_index] != counters_before[*counter_index])
        .map(|counter_index| COUNTER_NAMES[counter_index])
        .collect();
    assert_eq!((outcome.verdict, increased_counters), (XDP_PASS, Vec::from_iter(counter)), "{case}");
    assert_eq!(outcome.packet, frame, "{case}: unchanged");
}

fn request_datagram(payload: Vec<u8>) -> UdpDatagram {
    UdpDatagram { payload, ..UdpDatagram::new(CLIENT_ENDPOINT, SERVICE_ENDPOINT) }
}

/// Returns the one's complement sum over the UDP pseudo header, which is in the checksum field with checksum offload.
fn pseudo_header_sum(frame: &[u8]) -> u16 {
    let length_bytes = &frame[UDP_HEADER_OFFSET + 4..UDP_HEADER_OFFSET + 6];
    ones_complement_sum(&[&frame[IP_HEADER_OFFSET + 12..UDP_HEADER_OFFSET], &[0, 17], length_bytes].concat())
}

fn frame_with_udp_checksum(mut frame: Vec<u8>) -> Vec<u8> {
    let datagram_bytes = &frame[UDP_HEADER_OFFSET..];
    let checksum_sum = ones_complement_sum(&[&pseudo_header_sum(&frame).to_be_bytes()[..], datagram_bytes].concat());
    // A checksum of 0 is sent as 0xffff, because 0 means "no checksum" (RFC 768).
    let checksum = if checksum_sum == 0xffff { 0xffff } else { !checksum_sum };
    frame[UDP_CHECKSUM_OFFSET..UDP_CHECKSUM_OFFSET + 2].copy_from_slice(&checksum.to_be_bytes());
    frame
}

#[test]
fn requests_of_every_length_are_accepted() {
    skip_if!(missing_bpf_rights());
    let program = load_intake_program();
    for length in (0..200).chain([511, 512, 513, 1023, 1024, MAX_UDP_PAYLOAD_BYTES - 1, MAX_UDP_PAYLOAD_BYTES]) {
        let payload = (0..length).map(|byte| (byte * 7 + length) as u8).collect();
        let frame = frame_with_udp_checksum(request_datagram(payload).to_frame());
        expect_pass_with_counter(&program, &frame, NO_SOCKET_COUNTER, &format!("{length} bytes"));
        // A changed bit is detected in the header, in the checksum and in the last byte.
        for damaged_offset in [UDP_HEADER_OFFSET + 1, UDP_CHECKSUM_OFFSET, frame.len() - 1] {
            let mut damaged_frame = frame.clone();
            damaged_frame[damaged_offset] ^= 4;
            expect_pass_with_counter(
                &program,
                &damaged_frame,
                Some("passed_checksum"),
                &format!("{length} bytes, damaged at {damaged_offset}"),
            );
        }
    }
}

#[test]
fn datagrams_without_complete_checksum_are_accepted() {
    skip_if!(missing_bpf_rights());
    let program = load_intake_program();
    let mut frame = request_datagram(b"get".to_vec()).to_frame();
    expect_pass_with_counter(&program, &frame, NO_SOCKET_COUNTER, "no checksum");
    let partial_checksum = pseudo_header_sum(&frame);
    frame[UDP_CHECKSUM_OFFSET..UDP_CHECKSUM_OFFSET + 2].copy_from_slice(&partial_checksum.to_be_bytes());
    expect_pass_with_counter(&program, &frame, NO_SOCKET_COUNTER, "left to a NIC");
    frame[UDP_CHECKSUM_OFFSET + 1] ^= 1;
    expect_pass_with_counter(&program, &frame, Some("passed_checksum"), "neither");
    let mut frame = frame_with_udp_checksum(request_datagram(b"get".to_vec()).to_frame());
    frame[IP_HEADER_OFFSET + 11] ^= 1;
    expect_pass_with_counter(&program, &frame, Some("passed_checksum"), "that of the IP header");
    let padded_frame = [frame_with_udp_checksum(request_datagram(b"get".to_vec()).to_frame()), vec![9; 20]].concat();
    expect_pass_with_counter(&program, &padded_frame, NO_SOCKET_COUNTER, "padding of a short frame");
}

#[test]
fn non_request_traffic_passes_without_being_counted() {
    skip_if!(missing_bpf_rights());
    let program = load_intake_program();
    let frame_with_changed_byte = |offset: usize, value: u8| {
        let mut frame = frame_with_udp_checksum(request_datagram(b"get".to_vec()).to_frame());
        frame[offset] = value;
        frame
    };
    let vlan_frame = {
        let frame = frame_with_udp_checksum(request_datagram(b"get".to_vec()).to_frame());
        [&frame[..12], &[0x81, 0, 0, 5], &frame[12..]].concat()
    };
    let passed_frames = [
        ("another MAC address", frame_with_changed_byte(5, 1)),
        ("ARP", frame_with_changed_byte(13, 6)),
        ("IPv6", frame_with_changed_byte(12, 0x86)),
        ("TCP", frame_with_changed_byte(IP_HEADER_OFFSET + 9, 6)),
        (
            "another address",
            UdpDatagram::new(CLIENT_ENDPOINT, (Ipv4Addr::new(10, 0, 0, 2), SERVICE_ENDPOINT.1)).to_frame(),
        ),
        ("another port", UdpDatagram::new(CLIENT_ENDPOINT, (SERVICE_ENDPOINT.0, 4002)).to_frame()),
        ("IP options", UdpDatagram { ip_options: vec![1; 4], ..request_datagram(b"get".to_vec()) }.to_frame()),
        (
            "first fragment",
            UdpDatagram { flags_and_offset: MORE_FRAGMENTS_FLAG, ..request_datagram(vec![1; 16]) }.to_frame(),
        ),
        ("later fragment", UdpDatagram { flags_and_offset: 2, ..request_datagram(vec![1; 16]) }.to_frame()),
        ("VLAN", vlan_frame),
        ("a frame shorter than the headers", request_datagram(vec![]).to_frame()[..UDP_HEADER_OFFSET + 7].to_vec()),
    ];
    for (case, frame) in passed_frames {
        expect_pass_with_counter(&program, &frame, None, case);
    }
}

#[test]
fn requests_from_impossible_sources_pass_and_are_counted() {
    skip_if!(missing_bpf_rights());
    let program = load_intake_program();
    let request_frame_from =
        |source: ([u8; 4], u16)| UdpDatagram::new((source.0.into(), source.1), SERVICE_ENDPOINT).to_frame();
    for source in [
        ([0, 1, 2, 3], 40_000),
        ([127, 0, 0, 1], 40_000),
        ([224, 0, 0, 1], 40_000),
        ([255, 255, 255, 255], 40_000),
        ([192, 0, 2, 9], 0),
        (SERVICE_ENDPOINT.0.octets(), SERVICE_ENDPOINT.1),
        (OTHER_SERVICE_ENDPOINT.0.octets(), OTHER_SERVICE_ENDPOINT.1),
    ] {
        expect_pass_with_counter(&program, &request_frame_from(source), Some("passed_source"), &format!("{source:?}"));
    }
    expect_pass_with_counter(
        &program,
        &request_frame_from((OTHER_SERVICE_ENDPOINT.0.octets(), 4002)),
        NO_SOCKET_COUNTER,
        "a client on the same host",
    );
}

#[test]
fn requests_with_wrong_lengths_pass_and_are_counted() {
    skip_if!(missing_bpf_rights());
    let program = load_intake_program();
    let frame_with_udp_length = |udp_length: u16| {
        let mut frame = request_datagram(vec![1; 16]).to_frame();
        frame[UDP_HEADER_OFFSET + 4..UDP_HEADER_OFFSET + 6].copy_from_slice(&udp_length.to_be_bytes());
        frame
    };
    for udp_length in [0, 7, 23, 25] {
        expect_pass_with_counter(
            &program,
            &frame_with_udp_length(udp_length),
            Some("passed_length"),
            &format!("UDP length {udp_length}"),
        );
    }
    let complete_frame = request_datagram(vec![1; 16]).to_frame();
    expect_pass_with_counter(
        &program,
        &complete_frame[..complete_frame.len() - 1],
        Some("passed_length"),
        "a truncated frame",
    );
    expect_pass_with_counter(
        &program,
        &request_datagram(vec![1; MAX_UDP_PAYLOAD_BYTES + 1]).to_frame(),
        Some("passed_length"),
        "a jumbo frame",
    );
}
