//! Tests `examples/rocksdb.c` with GET, PUT and SCAN, and checks that the keys survive a restart.

use std::cell::Cell;
use std::net::UdpSocket;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;

use crate::server::{
    StopDaemonOnDrop, compile_example, connected_client_socket, send_request_until_answered, start_orchestrator,
    stop_server, unused_udp_address,
};

const GET_REQUEST_TYPE: u8 = 1;
const PUT_REQUEST_TYPE: u8 = 2;
const SCAN_REQUEST_TYPE: u8 = 128;
const STATUS_NOT_FOUND: u8 = 1;

type KeyValuePairs = Vec<(String, Vec<u8>)>;

fn build_request_datagram(request_type: u8, id: u32, key: &str, value: &[u8]) -> Vec<u8> {
    let mut bytes = vec![request_type, key.len() as u8];
    bytes.extend((value.len() as u16).to_le_bytes());
    bytes.extend(id.to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend(key.as_bytes());
    bytes.extend(value);
    bytes
}

struct KeyValueClient {
    socket: UdpSocket,
    next_request_id: Cell<u32>,
}

impl KeyValueClient {
    /// Sends a request. Returns the response's status and its key-value pairs.
    fn send_request(&self, request_type: u8, key: &str, value: &[u8]) -> (u8, KeyValuePairs) {
        let id = self.next_request_id.replace(self.next_request_id.get() + 1);
        let is_response_to_request = |response: &[u8]| response[4..8] == id.to_le_bytes();
        let response = send_request_until_answered(
            &self.socket,
            &build_request_datagram(request_type, id, key, value),
            is_response_to_request,
        );
        assert_eq!((response[0], &response[8..10]), (request_type, &[0, 1][..]));
        let (mut remaining_bytes, mut pairs) = (&response[12..], Vec::new());
        for _ in 0..u16::from_le_bytes([response[10], response[11]]) {
            let key_length = usize::from(remaining_bytes[0]);
            let value_length = usize::from(u16::from_le_bytes([remaining_bytes[2], remaining_bytes[3]]));
            let (pair_bytes, following_bytes) = remaining_bytes[4..].split_at(key_length + value_length);
            let (key, value) = pair_bytes.split_at(key_length);
            pairs.push((String::from_utf8(key.to_vec()).unwrap(), value.to_vec()));
            remaining_bytes = following_bytes;
        }
        assert!(remaining_bytes.is_empty());
        (response[1], pairs)
    }

    fn assert_stored_keys(&self) {
        assert_eq!(self.send_request(GET_REQUEST_TYPE, "key3", b""), (0, vec![key_value_pair(3)]));
        assert_eq!(self.send_request(GET_REQUEST_TYPE, "key", b""), (STATUS_NOT_FOUND, vec![]));
        assert_eq!(self.send_request(SCAN_REQUEST_TYPE + 3, "key2", b""), (0, (2..5).map(key_value_pair).collect()));
        assert_eq!(self.send_request(SCAN_REQUEST_TYPE + 127, "key8", b""), (0, (8..10).map(key_value_pair).collect()));
        // At most four pairs of 308 bytes fit into a datagram of 1472 bytes.
        assert_eq!(self.send_request(SCAN_REQUEST_TYPE + 127, "", b""), (0, (0..4).map(key_value_pair).collect()));
    }
}

fn key_value_pair(number: u8) -> (String, Vec<u8>) {
    (format!("key{number}"), vec![number; 300])
}

#[test]
fn rocksdb_server_keeps_keys_across_a_restart() {
    if !Path::new("/usr/include/rocksdb/c.h").exists() {
        println!("SKIPPED rocksdb_server_keeps_keys_across_a_restart: needs Debian package librocksdb-dev");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (memory, listen) = (directory.path().join("cores"), unused_udp_address());
    let services_toml = format!(
        "[[service]]\nlisten = \"{listen}\"\nmatch = {{ value = 1 }}\n\
         [[service]]\nlisten = \"{listen}\"\npriority = 1\n"
    );
    let mut daemon = start_orchestrator(&memory, &services_toml);
    let program = compile_example(directory.path(), "rocksdb", &["-lrocksdb"]);
    let start_rocksdb_server = || {
        let mut server = Command::new(&program);
        server.arg(&memory).args(["127.0.0.1", &listen.port().to_string()]).arg(directory.path().join("database"));
        server.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let stop_flag = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop_guard = StopDaemonOnDrop(&stop_flag);
        scope.spawn(|| daemon.run_until_stopped(&stop_flag).unwrap());
        let server = start_rocksdb_server();
        let client = KeyValueClient { socket: connected_client_socket(listen), next_request_id: Cell::new(0) };
        for (key, value) in (0..10).map(key_value_pair) {
            assert_eq!(client.send_request(PUT_REQUEST_TYPE, &key, &value), (0, vec![]));
        }
        // This datagram is no request, because it is shorter than its header states.
        client.socket.send(&build_request_datagram(GET_REQUEST_TYPE, 1, "key3", b"")[..14]).unwrap();
        client.assert_stored_keys();
        assert_clean_exit(stop_server(server));
        let server = start_rocksdb_server();
        client.assert_stored_keys();
        assert_clean_exit(stop_server(server));
    });
}

fn assert_clean_exit(output: std::process::Output) {
    let [printed, errors] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    assert!(output.status.success() && errors.is_empty(), "{printed}{errors}");
    assert!(printed.lines().count() == 2 && printed.contains("requests"), "{printed}");
}
