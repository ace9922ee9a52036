//! Datagrams in batches, over loopback.

use std::net::SocketAddrV4;
use std::time::Instant;

use coreward_orchestrator::socket::{BATCH, BatchSocket};

use crate::engine::TIMEOUT;

const MAX_BYTES: usize = 100;

fn socket() -> BatchSocket {
    BatchSocket::bind("127.0.0.1:0".parse().unwrap(), MAX_BYTES).unwrap()
}

/// Receives batches until `count` datagrams have arrived. Returns the lengths of the batches, and the datagrams.
fn receive(socket: &mut BatchSocket, from: SocketAddrV4, count: usize) -> (Vec<usize>, Vec<Vec<u8>>) {
    let (mut batches, mut datagrams, started) = (Vec::new(), Vec::new(), Instant::now());
    while datagrams.len() < count {
        assert!(started.elapsed() < TIMEOUT, "{} of {count} datagrams have arrived", datagrams.len());
        let mut accept = |sender, payload: &[u8]| {
            assert_eq!(sender, from);
            datagrams.push(payload.to_vec());
        };
        batches.push(socket.receive(&mut accept).unwrap());
    }
    (batches, datagrams)
}

#[test]
fn batches_arrive_whole_and_in_order() {
    let (mut client, mut server) = (socket(), socket());
    let (from, to) = (client.local_address().unwrap(), server.local_address().unwrap());
    assert_eq!(server.receive(&mut |_, _| panic!("nothing was sent")).unwrap(), 0);
    // Every length from 0 to one that is too long.
    let sent: Vec<Vec<u8>> = (0..=MAX_BYTES + 1).map(|length| vec![length as u8; length]).collect();
    sent.iter().for_each(|payload| client.send(to, payload));
    client.flush();
    let (batches, received) = receive(&mut server, from, sent.len());
    assert_eq!(batches[..3], [BATCH; 3]);
    assert_eq!((received, client.unsent()), (sent, 0));
}

#[test]
fn datagram_longer_than_its_memory_is_one_byte_longer_than_allowed() {
    let (mut client, mut server) = (socket(), socket());
    client.send(server.local_address().unwrap(), &[1; 2 * MAX_BYTES]);
    client.flush();
    let (_, received) = receive(&mut server, client.local_address().unwrap(), 1);
    assert_eq!(received, [vec![1; MAX_BYTES + 1]]);
}

#[test]
fn datagram_that_the_kernel_refuses_is_counted_alone() {
    let (mut client, mut server) = (socket(), socket());
    let to = server.local_address().unwrap();
    // Port 0 is no destination.
    let nowhere = SocketAddrV4::new(*to.ip(), 0);
    for (to, payload) in [(to, b"a"), (nowhere, b"b"), (nowhere, b"c"), (to, b"d")] {
        client.send(to, payload);
    }
    client.flush();
    let (_, received) = receive(&mut server, client.local_address().unwrap(), 2);
    assert_eq!((received, client.unsent()), (vec![b"a".to_vec(), b"d".to_vec()], 2));
}
