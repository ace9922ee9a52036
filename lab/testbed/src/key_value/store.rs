//! Ordered in-memory store, whose keys and values are bytes.

use std::collections::BTreeMap;
use std::ops::Bound;

use coreward_load::key_value::{self, KeyValueRequest, KeyValueResponseStatus, KeyValueResponseWriter};
use coreward_load::request_type::RequestType;
use parking_lot::RwLock;

/// Maximum number of keys that clients may add to the store's initial keys.
pub(crate) const MAX_ADDED_PAIR_COUNT: usize = 1_000_000;

type KeyValuePairs = BTreeMap<Box<[u8]>, Box<[u8]>>;

/// Key-value database of a server.
pub(crate) trait KeyValueDatabase: Send + Sync {
    /// Executes a request and writes its response.
    fn answer_request(&self, request: &KeyValueRequest<'_>, worker: u16, response: &mut KeyValueResponseWriter);
}

/// Returns the value of the initial key `number`.
pub(crate) fn initial_value_bytes(number: u32, length: usize) -> Vec<u8> {
    (0..length).map(|index| (number as usize + index) as u8).collect()
}

/// Key-value store in memory, which belongs to one worker or is shared by all workers.
#[derive(Debug)]
pub(crate) struct InMemoryStore {
    pairs: RwLock<KeyValuePairs>,
    /// Maximum number of keys. Once it is reached, a PUT of a new key is rejected, so clients cannot fill the memory.
    max_pair_count: usize,
}

impl InMemoryStore {
    /// Creates a store with `key_count` keys, whose names are [`key_value::key_name`] of the numbers from 0. Each value
    /// has `value_length` bytes.
    pub(crate) fn with_keys(key_count: u32, value_length: usize, max_pair_count: usize) -> Self {
        let build_initial_pair = |number: u32| {
            let key = key_value::key_name(number).into_bytes();
            (key.into_boxed_slice(), initial_value_bytes(number, value_length).into_boxed_slice())
        };
        Self { pairs: RwLock::new((0..key_count).map(build_initial_pair).collect()), max_pair_count }
    }

    fn get(&self, request: &KeyValueRequest<'_>, worker: u16, response: &mut KeyValueResponseWriter) {
        let pairs = self.read_pairs();
        let value = pairs.get(request.key);
        response.begin_response(
            request,
            if value.is_some() { KeyValueResponseStatus::Done } else { KeyValueResponseStatus::NotFound },
            worker,
        );
        if let Some(value) = value {
            assert!(response.push_pair(request.key, value), "requests have values that fit");
        }
    }

    fn put(&self, key: &[u8], value: &[u8]) -> KeyValueResponseStatus {
        // A writer that panicked left the map valid, before or after its PUT.
        let mut pairs = self.pairs.write();
        if let Some(stored_value) = pairs.get_mut(key) {
            *stored_value = value.into();
        } else if pairs.len() < self.max_pair_count {
            pairs.insert(key.into(), value.into());
        } else {
            return KeyValueResponseStatus::StoreFull;
        }
        KeyValueResponseStatus::Done
    }

    fn scan(&self, first_key: &[u8], pair_count: usize, response: &mut KeyValueResponseWriter) {
        let key_range = (Bound::Included(first_key), Bound::Unbounded);
        for (key, value) in self.read_pairs().range::<[u8], _>(key_range).take(pair_count) {
            assert!(response.push_pair(key, value), "127 pairs, each within one datagram");
        }
    }

    fn read_pairs(&self) -> parking_lot::RwLockReadGuard<'_, KeyValuePairs> {
        self.pairs.read()
    }
}

impl KeyValueDatabase for InMemoryStore {
    fn answer_request(&self, request: &KeyValueRequest<'_>, worker: u16, response: &mut KeyValueResponseWriter) {
        match request.request_type {
            RequestType::GET => self.get(request, worker, response),
            RequestType::PUT => {
                let status = self.put(request.key, request.value);
                response.begin_response(request, status, worker);
            }
            scan_type => {
                response.begin_response(request, KeyValueResponseStatus::Done, worker);
                if let Some(pair_count) = scan_type.scan_pair_count() {
                    self.scan(request.key, pair_count.into(), response);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use coreward_load::key_value::{MAX_DATAGRAM_BYTES, MAX_KEY_BYTES, MAX_VALUE_BYTES, key_name, parse_response};

    use super::*;

    type StatusAndPairs = (u8, Vec<(Vec<u8>, Vec<u8>)>);

    fn query_store(store: &InMemoryStore, request_type: &str, key: &[u8], value: &[u8]) -> StatusAndPairs {
        let request =
            KeyValueRequest { request_type: request_type.parse().unwrap(), request_id: 1, service_ns: 0, key, value };
        let mut response = KeyValueResponseWriter::default();
        store.answer_request(&request, 2, &mut response);
        let (mut status, mut all_pairs) = (0, Vec::new());
        for datagram in response.finish_response() {
            assert!(datagram.len() <= MAX_DATAGRAM_BYTES);
            let (header, pairs) = parse_response(datagram).unwrap();
            assert_eq!(header.worker_index.get(), 2);
            status = header.status_code;
            all_pairs.extend(pairs.into_iter().map(|(key, value)| (key.to_vec(), value.to_vec())));
        }
        (status, all_pairs)
    }

    #[test]
    fn stored_value_is_returned() {
        let store = InMemoryStore::with_keys(3, 4, 4);
        assert_eq!(query_store(&store, "GET", b"new", b""), (KeyValueResponseStatus::NotFound as u8, vec![]));
        assert_eq!(query_store(&store, "PUT", b"new", b"first"), (KeyValueResponseStatus::Done as u8, vec![]));
        assert_eq!(query_store(&store, "PUT", b"new", b"second"), (KeyValueResponseStatus::Done as u8, vec![]));
        assert_eq!(query_store(&store, "GET", b"new", b""), (0, vec![(b"new".to_vec(), b"second".to_vec())]));
        assert_eq!(query_store(&store, "PUT", b"another", b""), (KeyValueResponseStatus::StoreFull as u8, vec![]));
        assert_eq!(query_store(&store, "PUT", b"new", b""), (KeyValueResponseStatus::Done as u8, vec![]));
        let (_, pairs) = query_store(&store, "GET", key_name(2).as_bytes(), b"");
        assert_eq!(pairs, [(key_name(2).into_bytes(), vec![2, 3, 4, 5])]);
    }

    #[test]
    fn scan_returns_keys_in_order() {
        let store = InMemoryStore::with_keys(1_000, 100, 1_001);
        query_store(&store, "PUT", format!("{}x", key_name(500)).as_bytes(), b"between");
        let (status, pairs) = query_store(&store, "SCAN105", key_name(499).as_bytes(), b"");
        let mut expected: Vec<Vec<u8>> = (499..603).map(|number| key_name(number).into_bytes()).collect();
        expected.insert(2, format!("{}x", key_name(500)).into_bytes());
        let keys: Vec<Vec<u8>> = pairs.into_iter().map(|(key, _)| key).collect();
        assert_eq!((status, keys), (0, expected));
        // Scan from the first key, and beyond the last one.
        assert_eq!(query_store(&store, "SCAN1", b"", b"").1[0].0, key_name(0).into_bytes());
        assert_eq!(query_store(&store, "SCAN127", key_name(995).as_bytes(), b"").1.len(), 5);
        assert_eq!(query_store(&store, "WORK3", b"", b""), (0, vec![]));
    }

    #[test]
    fn longest_pairs_fit_in_datagrams() {
        let store = InMemoryStore::with_keys(0, 0, 200);
        for number in 0..127 {
            assert_eq!(
                query_store(&store, "PUT", &[number; MAX_KEY_BYTES], &[number; MAX_VALUE_BYTES]).0,
                KeyValueResponseStatus::Done as u8
            );
        }
        assert_eq!(query_store(&store, "SCAN127", b"", b"").1.len(), 127);
        assert_eq!(query_store(&store, "GET", &[5; MAX_KEY_BYTES], b"").1[0].1, [5; MAX_VALUE_BYTES]);
    }
}
