//! Checksums of generated frames.

use std::net::Ipv4Addr;

use coreward_fuzz::frame::{
    EthernetIpHeader, TCP, TcpHeader, UDP, ones_complement_sum, timestamp_option, transport_sum, udp,
};

#[test]
fn checksums_are_right() {
    let ip = |protocol| EthernetIpHeader {
        mac: [0; 6],
        source: Ipv4Addr::new(10, 1, 0, 7),
        destination: Ipv4Addr::new(10, 200, 0, 1),
        protocol,
        identification: 0x1234,
        fragment: 0x4000,
        option_words: 2,
        tos_and_ttl: [0, 64],
    };
    let mut frame = Vec::new();
    let tcp = TcpHeader { ports: (40312, 80), flags: 0x10, options: timestamp_option(1, 2).to_vec() };
    ip(TCP).append_frame(&mut frame, |frame| tcp.append_segment(frame, (1, 2), 7));
    assert_eq!(frame.len(), 14 + 28 + 32 + 7);
    assert_eq!(ones_complement_sum(&frame[14..42], 0), 0xffff);
    assert_eq!(transport_sum(&frame[14..], TCP, &frame[42..]), 0xffff);
    let mut frame = Vec::new();
    ip(UDP).append_frame(&mut frame, |frame| udp(frame, (40312, 53), 5));
    assert_eq!(transport_sum(&frame[14..], UDP, &frame[42..]), 0xffff);
}
