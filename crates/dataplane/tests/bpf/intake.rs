//! Tests of `bpf/orchestrate/intake.bpf.c` (`BPF_PROG_TEST_RUN`), which redirects datagrams to AF_XDP sockets.
//!
//! The tests have no AF_XDP socket, so a datagram that would be redirected counts as `passed_no_socket`.

use std::net::{Ipv4Addr, SocketAddrV4};

use coreward_dataplane::intake::program::{COUNTER_NAMES, IntakeProgram};
use coreward_dataplane::mac::MacAddress;
use coreward_dataplane::test_run;

use crate::support::balancer::XDP_PASS;
use crate::support::{MORE_FRAGMENTS, Udp, missing_bpf_rights, ones_complement_sum, skip_if};

const CLIENT: (Ipv4Addr, u16) = (Ipv4Addr::new(192, 0, 2, 9), 40_000);
const SERVICE: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 0, 0, 1), 4000);
const OTHER_SERVICE: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 0, 0, 1), 4001);
/// Offsets of headers and fields in a frame without IP options, in bytes.
const IP: usize = 14;
const UDP: usize = IP + 20;
const UDP_CHECKSUM: usize = UDP + 6;
/// Maximum payload of a datagram with an MTU of 1500, in bytes.
const MAX_PAYLOAD: usize = 1472;

const NO_SOCKET: Option<&str> = Some("passed_no_socket");

fn loaded() -> IntakeProgram {
    let listeners = [SERVICE, OTHER_SERVICE].map(|(address, port)| SocketAddrV4::new(address, port));
    IntakeProgram::load(MacAddress([0; 6]), &listeners).unwrap()
}

/// Runs the program on `frame`. Asserts that exactly `counter` has increased; `None`: that no counter has.
fn expect(program: &IntakeProgram, frame: &[u8], counter: Option<&str>, case: &str) {
    let before = program.counters().unwrap();
    let outcome = test_run::run(program.program(), frame, 1).unwrap();
    let after = program.counters().unwrap();
    let risen: Vec<_> =
        (0..COUNTER_NAMES.len()).filter(|at| after[*at] != before[*at]).map(|at| COUNTER_NAMES[at]).collect();
    assert_eq!((outcome.verdict, risen), (XDP_PASS, Vec::from_iter(counter)), "{case}");
    assert_eq!(outcome.packet, frame, "{case}: unchanged");
}

fn request(payload: Vec<u8>) -> Udp {
    Udp { payload, ..Udp::new(CLIENT, SERVICE) }
}

/// Returns the sum over the UDP pseudo header, not inverted: with checksum offload the checksum field contains it.
fn pseudo_header_sum(frame: &[u8]) -> u16 {
    let length = &frame[UDP + 4..UDP + 6];
    ones_complement_sum(&[&frame[IP + 12..UDP], &[0, 17], length].concat())
}

fn with_checksum(mut frame: Vec<u8>) -> Vec<u8> {
    let datagram = &frame[UDP..];
    let sum = ones_complement_sum(&[&pseudo_header_sum(&frame).to_be_bytes()[..], datagram].concat());
    // A checksum of 0 is sent as 0xffff, because 0 means "no checksum" (RFC 768).
    let checksum = if sum == 0xffff { 0xffff } else { !sum };
    frame[UDP_CHECKSUM..UDP_CHECKSUM + 2].copy_from_slice(&checksum.to_be_bytes());
    frame
}

#[test]
fn intake_takes_requests_of_every_length() {
    skip_if!(missing_bpf_rights());
    let program = loaded();
    for length in (0..200).chain([511, 512, 513, 1023, 1024, MAX_PAYLOAD - 1, MAX_PAYLOAD]) {
        let payload = (0..length).map(|byte| (byte * 7 + length) as u8).collect();
        let frame = with_checksum(request(payload).frame());
        expect(&program, &frame, NO_SOCKET, &format!("{length} bytes"));
        // A changed bit is noticed in the header, in the checksum and in the last byte.
        for at in [UDP + 1, UDP_CHECKSUM, frame.len() - 1] {
            let mut damaged = frame.clone();
            damaged[at] ^= 4;
            expect(&program, &damaged, Some("passed_checksum"), &format!("{length} bytes, damaged at {at}"));
        }
    }
}

#[test]
fn intake_takes_datagrams_whose_checksum_is_absent_or_left_to_a_nic() {
    skip_if!(missing_bpf_rights());
    let program = loaded();
    let mut frame = request(b"get".to_vec()).frame();
    expect(&program, &frame, NO_SOCKET, "no checksum");
    let partial = pseudo_header_sum(&frame);
    frame[UDP_CHECKSUM..UDP_CHECKSUM + 2].copy_from_slice(&partial.to_be_bytes());
    expect(&program, &frame, NO_SOCKET, "left to a NIC");
    frame[UDP_CHECKSUM + 1] ^= 1;
    expect(&program, &frame, Some("passed_checksum"), "neither");
    let mut frame = with_checksum(request(b"get".to_vec()).frame());
    frame[IP + 11] ^= 1;
    expect(&program, &frame, Some("passed_checksum"), "that of the IP header");
    let padded = [with_checksum(request(b"get".to_vec()).frame()), vec![9; 20]].concat();
    expect(&program, &padded, NO_SOCKET, "padding of a short frame");
}

#[test]
fn intake_passes_other_traffic_uncounted() {
    skip_if!(missing_bpf_rights());
    let program = loaded();
    let change = |at: usize, value: u8| {
        let mut frame = with_checksum(request(b"get".to_vec()).frame());
        frame[at] = value;
        frame
    };
    let vlan = {
        let frame = with_checksum(request(b"get".to_vec()).frame());
        [&frame[..12], &[0x81, 0, 0, 5], &frame[12..]].concat()
    };
    let cases = [
        ("another MAC address", change(5, 1)),
        ("ARP", change(13, 6)),
        ("IPv6", change(12, 0x86)),
        ("TCP", change(IP + 9, 6)),
        ("another address", Udp::new(CLIENT, (Ipv4Addr::new(10, 0, 0, 2), SERVICE.1)).frame()),
        ("another port", Udp::new(CLIENT, (SERVICE.0, 4002)).frame()),
        ("IP options", Udp { ip_options: vec![1; 4], ..request(b"get".to_vec()) }.frame()),
        ("first fragment", Udp { fragment: MORE_FRAGMENTS, ..request(vec![1; 16]) }.frame()),
        ("later fragment", Udp { fragment: 2, ..request(vec![1; 16]) }.frame()),
        ("VLAN", vlan),
        ("a frame shorter than the headers", request(vec![]).frame()[..UDP + 7].to_vec()),
    ];
    for (case, frame) in cases {
        expect(&program, &frame, None, case);
    }
}

#[test]
fn intake_passes_doubtful_requests_by_reason() {
    skip_if!(missing_bpf_rights());
    let program = loaded();
    let request_from = |source: ([u8; 4], u16)| Udp::new((source.0.into(), source.1), SERVICE).frame();
    for source in [
        ([0, 1, 2, 3], 40_000),
        ([127, 0, 0, 1], 40_000),
        ([224, 0, 0, 1], 40_000),
        ([255, 255, 255, 255], 40_000),
        ([192, 0, 2, 9], 0),
        (SERVICE.0.octets(), SERVICE.1),
        (OTHER_SERVICE.0.octets(), OTHER_SERVICE.1),
    ] {
        expect(&program, &request_from(source), Some("passed_source"), &format!("{source:?}"));
    }
    expect(&program, &request_from((OTHER_SERVICE.0.octets(), 4002)), NO_SOCKET, "a client on the same host");
    let length_of = |udp_length: u16| {
        let mut frame = request(vec![1; 16]).frame();
        frame[UDP + 4..UDP + 6].copy_from_slice(&udp_length.to_be_bytes());
        frame
    };
    for udp_length in [0, 7, 23, 25] {
        expect(&program, &length_of(udp_length), Some("passed_length"), &format!("UDP length {udp_length}"));
    }
    let whole = request(vec![1; 16]).frame();
    expect(&program, &whole[..whole.len() - 1], Some("passed_length"), "a truncated frame");
    expect(&program, &request(vec![1; MAX_PAYLOAD + 1]).frame(), Some("passed_length"), "a jumbo frame");
}
