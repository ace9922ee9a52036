//! What every load balancer is to have now, encoded once for all of them. Whoever is slow finds the newest here when it comes
//! to look, and nothing queues up.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use coreward_wire::ServiceIndex;
use prost::bytes::Bytes;
use tokio::sync::watch;

/// The newest configuration and the newest table of each service.
pub struct Board {
    posted: Mutex<Posted>,
    /// Grows with every posting.
    changes: watch::Sender<u64>,
}

struct Posted {
    configuration: Bytes,
    /// The posting that brought the configuration.
    configured: u64,
    newest: u64,
    tables: HashMap<ServiceIndex, (u64, Bytes)>,
    /// The same by posting.
    order: BTreeMap<(u64, ServiceIndex), Bytes>,
}

/// What somebody has not seen yet.
pub struct News {
    /// Comes before the tables.
    pub configuration: Option<Bytes>,
    /// Of each service the newest.
    pub tables: Vec<Bytes>,
}

/// What somebody has seen.
#[derive(Debug, Default)]
pub struct Seen(u64);

impl Board {
    /// A configuration, no tables yet.
    pub fn new(configuration: Bytes) -> Self {
        let posted = Posted { configuration, configured: 1, newest: 1, tables: HashMap::new(), order: BTreeMap::new() };
        Self { posted: Mutex::new(posted), changes: watch::Sender::new(1) }
    }

    fn posted(&self) -> MutexGuard<'_, Posted> {
        // Every call leaves it whole.
        self.posted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn post(&self, change: impl FnOnce(&mut Posted, u64)) {
        let newest = {
            let mut posted = self.posted();
            posted.newest += 1;
            let newest = posted.newest;
            change(&mut posted, newest);
            newest
        };
        self.changes.send_replace(newest);
    }

    /// New tables.
    pub fn post_tables(&self, tables: impl IntoIterator<Item = (ServiceIndex, Bytes)>) {
        self.post(|posted, number| {
            for (service, table) in tables {
                if let Some((before, _)) = posted.tables.insert(service, (number, table.clone())) {
                    posted.order.remove(&(before, service));
                }
                posted.order.insert((number, service), table);
            }
        });
    }

    /// Another configuration; tables of services that it does not `keep` are gone.
    pub fn post_configuration(&self, configuration: Bytes, keep: impl Fn(ServiceIndex) -> bool) {
        self.post(|posted, number| {
            posted.configuration = configuration;
            posted.configured = number;
            posted.tables.retain(|service, _| keep(*service));
            posted.order.retain(|(_, service), _| keep(*service));
        });
    }

    /// What has come since; from now on it is seen.
    pub fn news(&self, seen: &mut Seen) -> News {
        let posted = self.posted();
        let configuration = (posted.configured > seen.0).then(|| posted.configuration.clone());
        let first = (seen.0 + 1, ServiceIndex::FIRST);
        let tables = posted.order.range(first..).map(|(_, table)| table.clone()).collect();
        seen.0 = posted.newest;
        News { configuration, tables }
    }

    /// Changes with every posting.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(index: u32) -> ServiceIndex {
        ServiceIndex::new(index).unwrap()
    }

    #[test]
    fn each_sees_the_newest_once() {
        let board = Board::new("a".into());
        let mut seen = Seen::default();
        let told = |seen: &mut Seen| {
            let news = board.news(seen);
            let tables: Vec<Vec<u8>> = news.tables.iter().map(|table| table.to_vec()).collect();
            (news.configuration.map(|bytes| bytes.to_vec()), tables)
        };
        assert_eq!(told(&mut seen), (Some(b"a".to_vec()), vec![]));
        board.post_tables([(service(1), "1".into()), (service(2), "2".into())]);
        board.post_tables([(service(1), "1 again".into())]);
        assert_eq!(told(&mut seen), (None, vec![b"2".to_vec(), b"1 again".to_vec()]));
        assert_eq!(told(&mut seen), (None, vec![]));
        board.post_configuration("b".into(), |index| index == service(2));
        assert_eq!(told(&mut seen), (Some(b"b".to_vec()), vec![]));
        assert_eq!(told(&mut Seen::default()), (Some(b"b".to_vec()), vec![b"2".to_vec()]));
    }
}
