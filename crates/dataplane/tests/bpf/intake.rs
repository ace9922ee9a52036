//! Tests of `bpf/orchestrate/intake.bpf.c`, which redirects datagrams to AF_XDP sockets (`BPF_PROG_TEST_RUN`).
//!
//! As the tests have no AF_XDP socket, a datagram that would be redirected is counted as `passed_no_socket`.

use std::net::{Ipv4Addr, SocketAddrV4};

use coreward_dataplane::intake::program::{COUNTER_NAMES, IntakeProgram};
use coreward_dataplane::mac::MacAddress;
use coreward_dataplane::test_run;

use crate::support::balancer::XDP_PASS;
use crate::support::{MORE_FRAGMENTS, UdpDatagram, missing_bpf_rights, ones_complement_sum, skip_if};

const CLIENT: (Ipv4Addr, u16) = (Ipv4Addr::new(192, 0, 2, 9), 40_000);
const SERVICE: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 0, 0, 1), 4000);
const OTHER_SERVICE: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 0, 0, 1), 4001);
/// Offset of the IP header in a frame, in bytes. The frames have no IP options.
const IP_OFFSET: usize = 14;
const UDP_OFFSET: usize = IP_OFFSET + 20;
const UDP_CHECKSUM_OFFSET: usize = UDP_OFFSET + 6;
/// Maximum payload of a datagram with an MTU of 1500, in bytes.
const MAX_PAYLOAD_BYTES: usize = 1472;

const NO_SOCKET_COUNTER: Option<&str> = Some("passed_no_socket");

fn load_intake_program() -> IntakeProgram {
    let listeners = [SERVICE, OTHER_SERVICE].map(|(address, port)| SocketAddrV4::new(address, port));
    IntakeProgram::load(MacAddress([0; 6]), &listeners).unwrap()
}

/// Runs the program on `frame`. Asserts that only `counter` has increased, or no counter if `counter` is `None`.
fn expect_counter(program: &IntakeProgram, frame: &[u8], counter: Option<&str>, case: &str) {
    let counters_before = program.counters().unwrap();
    let outcome = test_run::run(program.program(), frame, 1).unwrap();
    let counters_after = program.counters().unwrap();
    let increased_counters: Vec<_> = (0..COUNTER_NAMES.len())
        .filter(|counter_index| counters_after[*counter_index] != counters_before[*counter_index])
        .map(|counter_index| COUNTER_NAMES[counter_index])
        .collect();
    assert_eq!((outcome.verdict, increased_counters), (XDP_PASS, Vec::from_iter(counter)), "{case}");
    assert_eq!(outcome.packet, frame, "{case}: unchanged");
}

fn request_datagram(payload: Vec<u8>) -> UdpDatagram {
    UdpDatagram { payload, ..UdpDatagram::new(CLIENT, SERVICE) }
}

/// Returns the one's complement sum over the UDP pseudo header, which is in the checksum field with checksum offload.
fn pseudo_header_sum(frame: &[u8]) -> u16 {
    let length_bytes = &frame[UDP_OFFSET + 4..UDP_OFFSET + 6];
    ones_complement_sum(&[&frame[IP_OFFSET + 12..UDP_OFFSET], &[0, 17], length_bytes].concat())
}

fn frame_with_udp_checksum(mut frame: Vec<u8>) -> Vec<u8> {
    let datagram_bytes = &frame[UDP_OFFSET..];
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
    for length in (0..200).chain([511, 512, 513, 1023, 1024, MAX_PAYLOAD_BYTES - 1, MAX_PAYLOAD_BYTES]) {
        let payload = (0..length).map(|byte| (byte * 7 + length) as u8).collect();
        let frame = frame_with_udp_checksum(request_datagram(payload).frame());
        expect_counter(&program, &frame, NO_SOCKET_COUNTER, &format!("{length} bytes"));
        // A changed bit is detected in the header, in the checksum and in the last byte.
        for damaged_offset in [UDP_OFFSET + 1, UDP_CHECKSUM_OFFSET, frame.len() - 1] {
            let mut damaged_frame = frame.clone();
            damaged_frame[damaged_offset] ^= 4;
            expect_counter(
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
    let mut frame = request_datagram(b"get".to_vec()).frame();
    expect_counter(&program, &frame, NO_SOCKET_COUNTER, "no checksum");
    let partial_checksum = pseudo_header_sum(&frame);
    frame[UDP_CHECKSUM_OFFSET..UDP_CHECKSUM_OFFSET + 2].copy_from_slice(&partial_checksum.to_be_bytes());
    expect_counter(&program, &frame, NO_SOCKET_COUNTER, "left to a NIC");
    frame[UDP_CHECKSUM_OFFSET + 1] ^= 1;
    expect_counter(&program, &frame, Some("passed_checksum"), "neither");
    let mut frame = frame_with_udp_checksum(request_datagram(b"get".to_vec()).frame());
    frame[IP_OFFSET + 11] ^= 1;
    expect_counter(&program, &frame, Some("passed_checksum"), "that of the IP header");
    let padded_frame = [frame_with_udp_checksum(request_datagram(b"get".to_vec()).frame()), vec![9; 20]].concat();
    expect_counter(&program, &padded_frame, NO_SOCKET_COUNTER, "padding of a short frame");
}

#[test]
fn other_traffic_passes_without_being_counted() {
    skip_if!(missing_bpf_rights());
    let program = load_intake_program();
    let changed_frame = |offset: usize, value: u8| {
        let mut frame = frame_with_udp_checksum(request_datagram(b"get".to_vec()).frame());
        frame[offset] = value;
        frame
    };
    let vlan_frame = {
        let frame = frame_with_udp_checksum(request_datagram(b"get".to_vec()).frame());
        [&frame[..12], &[0x81, 0, 0, 5], &frame[12..]].concat()
    };
    let passed_frames = [
        ("another MAC address", changed_frame(5, 1)),
        ("ARP", changed_frame(13, 6)),
        ("IPv6", changed_frame(12, 0x86)),
        ("TCP", changed_frame(IP_OFFSET + 9, 6)),
        ("another address", UdpDatagram::new(CLIENT, (Ipv4Addr::new(10, 0, 0, 2), SERVICE.1)).frame()),
        ("another port", UdpDatagram::new(CLIENT, (SERVICE.0, 4002)).frame()),
        ("IP options", UdpDatagram { ip_options: vec![1; 4], ..request_datagram(b"get".to_vec()) }.frame()),
        ("first fragment", UdpDatagram { flags_and_offset: MORE_FRAGMENTS, ..request_datagram(vec![1; 16]) }.frame()),
        ("later fragment", UdpDatagram { flags_and_offset: 2, ..request_datagram(vec![1; 16]) }.frame()),
        ("VLAN", vlan_frame),
        ("a frame shorter than the headers", request_datagram(vec![]).frame()[..UDP_OFFSET + 7].to_vec()),
    ];
    for (case, frame) in passed_frames {
        expect_counter(&program, &frame, None, case);
    }
}

#[test]
fn requests_from_impossible_sources_pass_and_are_counted() {
    skip_if!(missing_bpf_rights());
    let program = load_intake_program();
    let request_from = |source: ([u8; 4], u16)| UdpDatagram::new((source.0.into(), source.1), SERVICE).frame();
    for source in [
        ([0, 1, 2, 3], 40_000),
        ([127, 0, 0, 1], 40_000),
        ([224, 0, 0, 1], 40_000),
        ([255, 255, 255, 255], 40_000),
        ([192, 0, 2, 9], 0),
        (SERVICE.0.octets(), SERVICE.1),
        (OTHER_SERVICE.0.octets(), OTHER_SERVICE.1),
    ] {
        expect_counter(&program, &request_from(source), Some("passed_source"), &format!("{source:?}"));
    }
    expect_counter(
        &program,
        &request_from((OTHER_SERVICE.0.octets(), 4002)),
        NO_SOCKET_COUNTER,
        "a client on the same host",
    );
}

#[test]
fn requests_with_wrong_lengths_pass_and_are_counted() {
    skip_if!(missing_bpf_rights());
    let program = load_intake_program();
    let frame_with_udp_length = |udp_length: u16| {
        let mut frame = request_datagram(vec![1; 16]).frame();
        frame[UDP_OFFSET + 4..UDP_OFFSET + 6].copy_from_slice(&udp_length.to_be_bytes());
        frame
    };
    for udp_length in [0, 7, 23, 25] {
        expect_counter(
            &program,
            &frame_with_udp_length(udp_length),
            Some("passed_length"),
            &format!("UDP length {udp_length}"),
        );
    }
    let complete_frame = request_datagram(vec![1; 16]).frame();
    expect_counter(&program, &complete_frame[..complete_frame.len() - 1], Some("passed_length"), "a truncated frame");
    expect_counter(
        &program,
        &request_datagram(vec![1; MAX_PAYLOAD_BYTES + 1]).frame(),
        Some("passed_length"),
        "a jumbo frame",
    );
}
