//! `examples/rocksdb.c`: GET, PUT and SCAN, and the same keys after a restart.

use std::cell::Cell;
use std::net::UdpSocket;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;

use crate::server::{StopOnDrop, ask, client, compile, end, free_address, orchestrator_of};

const GET: u8 = 1;
const PUT: u8 = 2;
const SCAN: u8 = 128;
const NOT_FOUND: u8 = 1;

type Pairs = Vec<(String, Vec<u8>)>;

fn datagram(request_type: u8, id: u32, key: &str, value: &[u8]) -> Vec<u8> {
    let mut bytes = vec![request_type, key.len() as u8];
    bytes.extend((value.len() as u16).to_le_bytes());
    bytes.extend(id.to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend(key.as_bytes());
    bytes.extend(value);
    bytes
}

struct Client {
    socket: UdpSocket,
    next_id: Cell<u32>,
}

impl Client {
    /// Sends a request, and returns the status and the pairs of the response.
    fn call(&self, request_type: u8, key: &str, value: &[u8]) -> (u8, Pairs) {
        let id = self.next_id.replace(self.next_id.get() + 1);
        let is_response = |response: &[u8]| response[4..8] == id.to_le_bytes();
        let response = ask(&self.socket, &datagram(request_type, id, key, value), is_response);
        assert_eq!((response[0], &response[8..10]), (request_type, &[0, 1][..]));
        let (mut rest, mut pairs) = (&response[12..], Vec::new());
        for _ in 0..u16::from_le_bytes([response[10], response[11]]) {
            let key_length = usize::from(rest[0]);
            let value_length = usize::from(u16::from_le_bytes([rest[2], rest[3]]));
            let (pair, others) = rest[4..].split_at(key_length + value_length);
            let (key, value) = pair.split_at(key_length);
            pairs.push((String::from_utf8(key.to_vec()).unwrap(), value.to_vec()));
            rest = others;
        }
        assert!(rest.is_empty());
        (response[1], pairs)
    }

    fn check_keys(&self) {
        assert_eq!(self.call(GET, "key3", b""), (0, vec![pair(3)]));
        assert_eq!(self.call(GET, "key", b""), (NOT_FOUND, vec![]));
        assert_eq!(self.call(SCAN + 3, "key2", b""), (0, (2..5).map(pair).collect()));
        assert_eq!(self.call(SCAN + 127, "key8", b""), (0, (8..10).map(pair).collect()));
        // Four pairs of 308 bytes fit a datagram of 1472.
        assert_eq!(self.call(SCAN + 127, "", b""), (0, (0..4).map(pair).collect()));
    }
}

fn pair(number: u8) -> (String, Vec<u8>) {
    (format!("key{number}"), vec![number; 300])
}

#[test]
fn rocksdb_server_keeps_keys_across_a_restart() {
    if !Path::new("/usr/include/rocksdb/c.h").exists() {
        println!("SKIPPED rocksdb_server_keeps_keys_across_a_restart: needs Debian package librocksdb-dev");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (memory, listen) = (directory.path().join("cores"), free_address());
    let services = format!(
        "[[service]]\nlisten = \"{listen}\"\nmatch = {{ value = 1 }}\n\
         [[service]]\nlisten = \"{listen}\"\npriority = 1\n"
    );
    let mut daemon = orchestrator_of(&memory, &services);
    let program = compile(directory.path(), "rocksdb", &["-lrocksdb"]);
    let start = || {
        let mut server = Command::new(&program);
        server.arg(&memory).args(["127.0.0.1", &listen.port().to_string()]).arg(directory.path().join("database"));
        server.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _end = StopOnDrop(&stop);
        scope.spawn(|| daemon.run(&stop).unwrap());
        let server = start();
        let client = Client { socket: client(listen), next_id: Cell::new(0) };
        for (key, value) in (0..10).map(pair) {
            assert_eq!(client.call(PUT, &key, &value), (0, vec![]));
        }
        // No request: its lengths differ from its header.
        client.socket.send(&datagram(GET, 1, "key3", b"")[..14]).unwrap();
        client.check_keys();
        assert_ended(end(server));
        let server = start();
        client.check_keys();
        assert_ended(end(server));
    });
}

fn assert_ended(output: std::process::Output) {
    let [printed, errors] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    assert!(output.status.success() && errors.is_empty(), "{printed}{errors}");
    assert!(printed.lines().count() == 2 && printed.contains("requests"), "{printed}");
}
