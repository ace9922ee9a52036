//! Tests batches of datagrams over the loopback device.

use std::net::SocketAddrV4;
use std::time::Instant;

use coreward_orchestrator::socket::{MAX_DATAGRAMS_PER_SYSCALL, UdpBatchSocket};

use crate::engine::CONDITION_TIMEOUT;

const MAX_DATAGRAM_BYTES: usize = 100;

fn bind_loopback_socket() -> UdpBatchSocket {
    UdpBatchSocket::bind("127.0.0.1:0".parse().unwrap(), MAX_DATAGRAM_BYTES).unwrap()
}

/// Receives batches until `datagram_count` datagrams have arrived. Returns the number of datagrams in each batch, and
/// all datagrams.
fn receive_datagrams(
    socket: &mut UdpBatchSocket,
    sender_address: SocketAddrV4,
    datagram_count: usize,
) -> (Vec<usize>, Vec<Vec<u8>>) {
    let (mut batches, mut datagrams, started_at) = (Vec::new(), Vec::new(), Instant::now());
    while datagrams.len() < datagram_count {
        assert!(
            started_at.elapsed() < CONDITION_TIMEOUT,
            "{} of {datagram_count} datagrams have arrived",
            datagrams.len()
        );
        let mut record_datagram = |sender, payload: &[u8]| {
            assert_eq!(sender, sender_address);
            datagrams.push(payload.to_vec());
        };
        batches.push(socket.receive_batch(&mut record_datagram).unwrap());
    }
    (batches, datagrams)
}

#[test]
fn batches_arrive_completely_and_in_order() {
    let (mut client, mut server) = (bind_loopback_socket(), bind_loopback_socket());
    let (client_address, server_address) = (client.local_address().unwrap(), server.local_address().unwrap());
    assert_eq!(server.receive_batch(&mut |_, _| panic!("nothing was sent")).unwrap(), 0);
    // The lengths range from 0 to one that is too long.
    let sent_payloads: Vec<Vec<u8>> = (0..=MAX_DATAGRAM_BYTES + 1).map(|length| vec![length as u8; length]).collect();
    sent_payloads.iter().for_each(|payload| client.queue_datagram(server_address, payload));
    client.flush();
    let (batches, received) = receive_datagrams(&mut server, client_address, sent_payloads.len());
    assert_eq!(batches[..3], [MAX_DATAGRAMS_PER_SYSCALL; 3]);
    assert_eq!((received, client.unsent_datagram_count()), (sent_payloads, 0));
}

#[test]
fn too_long_datagram_is_cut_to_one_byte_more_than_allowed() {
    let (mut client, mut server) = (bind_loopback_socket(), bind_loopback_socket());
    client.queue_datagram(server.local_address().unwrap(), &[1; 2 * MAX_DATAGRAM_BYTES]);
    client.flush();
    let (_, received) = receive_datagrams(&mut server, client.local_address().unwrap(), 1);
    assert_eq!(received, [vec![1; MAX_DATAGRAM_BYTES + 1]]);
}

#[test]
fn only_the_datagram_that_the_kernel_rejects_is_counted_as_unsent() {
    let (mut client, mut server) = (bind_loopback_socket(), bind_loopback_socket());
    let to = server.local_address().unwrap();
    // Datagrams cannot be sent to port 0.
    let invalid_destination = SocketAddrV4::new(*to.ip(), 0);
    for (to, payload) in [(to, b"a"), (invalid_destination, b"b"), (invalid_destination, b"c"), (to, b"d")] {
        client.queue_datagram(to, payload);
    }
    client.flush();
    let (_, received) = receive_datagrams(&mut server, client.local_address().unwrap(), 2);
    assert_eq!((received, client.unsent_datagram_count()), (vec![b"a".to_vec(), b"d".to_vec()], 2));
}
