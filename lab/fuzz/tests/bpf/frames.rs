//! Tests of the checksums in generated frames.

use std::net::Ipv4Addr;

use coreward_fuzz::frame::{
    EthernetIpHeader, PROTOCOL_TCP, PROTOCOL_UDP, TcpHeader, append_udp_datagram, ones_complement_sum,
    sum_with_pseudo_header, timestamp_option,
};

#[test]
fn checksums_of_generated_frames_are_correct() {
    let build_ip_header = |protocol| EthernetIpHeader {
        destination_mac: [0; 6],
        source: Ipv4Addr::new(10, 1, 0, 7),
        destination: Ipv4Addr::new(10, 200, 0, 1),
        protocol,
        ip_identification: 0x1234,
        fragment_flags_and_offset: 0x4000,
        option_word_count: 2,
        tos_and_ttl: [0, 64],
    };
    let mut frame = Vec::new();
    let tcp_header = TcpHeader {
        source_and_destination_ports: (40312, 80),
        tcp_flags: 0x10,
        options: timestamp_option(1, 2).to_vec(),
    };
    build_ip_header(PROTOCOL_TCP).append_frame(&mut frame, |frame| tcp_header.append_segment(frame, (1, 2), 7));
    assert_eq!(frame.len(), 14 + 28 + 32 + 7);
    assert_eq!(ones_complement_sum(&frame[14..42], 0), 0xffff);
    assert_eq!(sum_with_pseudo_header(&frame[14..], PROTOCOL_TCP, &frame[42..]), 0xffff);
    let mut frame = Vec::new();
    build_ip_header(PROTOCOL_UDP).append_frame(&mut frame, |frame| append_udp_datagram(frame, (40312, 53), 5));
    assert_eq!(sum_with_pseudo_header(&frame[14..], PROTOCOL_UDP, &frame[42..]), 0xffff);
}
