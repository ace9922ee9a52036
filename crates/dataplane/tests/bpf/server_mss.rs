//! `bpf/server/mss.h`: the MSS that a server announces, seen by the client's kernel.

use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;

use coreward_intf as intf;
use coreward_model::consistency::{ServiceMode, Timestamps};
use coreward_model::forwarding::Forwarding;
use nix::sys::socket::{getsockopt, sockopt};

use crate::support::may_load_bpf;
use crate::support::server_bed::Bed;

/// Ethernet's MTU less the headers of IPv4 and TCP and the timestamp option with its padding.
const LONGEST_SEGMENT: u32 = 1500 - 20 - 20 - 12;
/// GUE's, the longer one.
const OUTER_HEADER: u32 = 28;

/// Connects, sends a request and returns the client's segment size and the number of clamped SYN-ACKs.
fn segment_size(mode: ServiceMode) -> (u32, u64) {
    let bed = Bed::with(mode);
    let listener = bed.listen();
    let (mut client, mut server) = bed.connection(&listener);
    client.write_all(&[7; 100_000]).unwrap();
    server.read_exact(&mut [0; 100_000]).unwrap();
    bed.assert_nobody_noticed();
    (getsockopt(&client.as_fd(), sockopt::TcpMaxSeg).unwrap(), bed.counter(intf::SERVER_COUNTER_MSS_CLAMPED))
}

#[test]
fn syn_ack_leaves_room_for_the_outer_header() {
    if !may_load_bpf("syn_ack_leaves_room_for_the_outer_header") {
        return;
    }
    for timestamps in [Timestamps::Server, Timestamps::Off] {
        for forwarding in [Forwarding::Ipip, Forwarding::Gue] {
            let mode = ServiceMode { timestamps, forwarding, ..ServiceMode::default() };
            let (size, clamped) = segment_size(mode);
            assert_eq!(size, LONGEST_SEGMENT - OUTER_HEADER, "{mode:?}");
            assert!(clamped >= 1);
        }
    }
}

#[test]
fn syn_ack_on_one_segment_is_unchanged() {
    if !may_load_bpf("syn_ack_on_one_segment_is_unchanged") {
        return;
    }
    assert_eq!(segment_size(ServiceMode::default()), (LONGEST_SEGMENT, 0));
}
