//! What every load balancer is to have now, encoded once for all of them. Whoever is slow finds the newest here when it comes
//! to look, and nothing queues up.

use std::collections::{BTreeMap, HashMap};
use std::sync::OnceLock;

use coreward_wire::{FleetChange, FleetConfiguration, ServiceIndex};
use parking_lot::{Mutex, MutexGuard};
use prost::bytes::Bytes;
use tokio::sync::watch;

/// The newest configuration and the newest table of each service.
pub struct Board {
    posted: Mutex<Posted>,
    /// Grows with every posting.
    changes: watch::Sender<u64>,
}

struct Posted {
    configuration: PostedConfiguration,
    newest: u64,
    tables: HashMap<ServiceIndex, (u64, Bytes)>,
    /// The same by posting.
    order: BTreeMap<(u64, ServiceIndex), Bytes>,
}

struct PostedConfiguration {
    fleet: FleetConfiguration,
    /// The posting that brought it.
    number: u64,
    /// Encoded, once somebody needs it whole.
    whole: OnceLock<Bytes>,
    /// The posting of the one before, and what has changed since.
    change: Option<(u64, Bytes)>,
}

/// What somebody has not seen yet.
pub struct News {
    /// Comes before the tables.
    pub configuration: Option<Told>,
    /// Of each service the newest.
    pub tables: Vec<Bytes>,
}

/// A configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Told {
    /// An encoded [`FleetConfiguration`].
    Whole(Bytes),
    /// An encoded [`FleetChange`].
    Change(Bytes),
}

/// What somebody has seen.
#[derive(Debug, Default)]
pub struct Seen {
    newest: u64,
    /// The posting of the configuration.
    configuration: u64,
}

impl PostedConfiguration {
    fn new(fleet: FleetConfiguration, number: u64, change: Option<(u64, Bytes)>) -> Self {
        Self { fleet, number, whole: OnceLock::new(), change }
    }

    /// For somebody who has seen the configuration of that posting.
    fn after(&self, seen: u64) -> Told {
        match &self.change {
            Some((base, change)) if *base == seen => Told::Change(change.clone()),
            _ => Told::Whole(self.whole.get_or_init(|| self.fleet.encode(self.number)).clone()),
        }
    }
}

impl Board {
    /// A configuration, no tables yet.
    pub fn new(configuration: FleetConfiguration) -> Self {
        let configuration = PostedConfiguration::new(configuration, 1, None);
        let posted = Posted { configuration, newest: 1, tables: HashMap::new(), order: BTreeMap::new() };
        Self { posted: Mutex::new(posted), changes: watch::Sender::new(1) }
    }

    fn posted(&self) -> MutexGuard<'_, Posted> {
        // Every call leaves it whole.
        self.posted.lock()
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
    pub fn post_configuration(&self, configuration: FleetConfiguration, keep: impl Fn(ServiceIndex) -> bool) {
        self.post(|posted, number| {
            let before = &posted.configuration;
            let change = FleetChange::between((before.number, &before.fleet), (number, &configuration));
            let change = Some((before.number, change.encode()));
            posted.configuration = PostedConfiguration::new(configuration, number, change);
            posted.tables.retain(|service, _| keep(*service));
            posted.order.retain(|(_, service), _| keep(*service));
        });
    }

    /// What has come since; from now on it is seen.
    pub fn news(&self, seen: &mut Seen) -> News {
        let posted = self.posted();
        let number = posted.configuration.number;
        let configuration = (number > seen.newest).then(|| posted.configuration.after(seen.configuration));
        let first = (seen.newest + 1, ServiceIndex::FIRST);
        let tables = posted.order.range(first..).map(|(_, table)| table.clone()).collect();
        (seen.newest, seen.configuration) = (posted.newest, number);
        News { configuration, tables }
    }

    /// Changes with every posting.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use coreward_model::cookie::{CookieKey, FleetKeys, KeyIndex};

    use super::*;

    fn service(index: u32) -> ServiceIndex {
        ServiceIndex::new(index).unwrap()
    }

    fn configuration(generation: u64) -> FleetConfiguration {
        let key = CookieKey { k0: 1, k1: 2 };
        FleetConfiguration {
            generation,
            keys: FleetKeys { keys: [key; 2], current: KeyIndex::First },
            services: Vec::new(),
            load_balancers: Vec::new(),
            report_interval: Duration::from_millis(100),
            table_lifetime: Duration::from_secs(10),
        }
    }

    /// Generations of a configuration whole or of a change, and tables.
    fn told(board: &Board, seen: &mut Seen) -> (Option<u64>, Option<u64>, Vec<Vec<u8>>) {
        let news = board.news(seen);
        let (mut whole, mut change) = (None, None);
        match news.configuration {
            Some(Told::Whole(bytes)) => whole = Some(FleetConfiguration::decode(bytes).unwrap().1.generation),
            Some(Told::Change(bytes)) => change = Some(FleetChange::decode(bytes).unwrap().0.configuration.generation),
            None => {}
        }
        (whole, change, news.tables.iter().map(|table| table.to_vec()).collect())
    }

    #[test]
    fn each_sees_the_newest_once() {
        let board = Board::new(configuration(1));
        let mut seen = Seen::default();
        assert_eq!(told(&board, &mut seen), (Some(1), None, vec![]));
        board.post_tables([(service(1), "1".into()), (service(2), "2".into())]);
        board.post_tables([(service(1), "1 again".into())]);
        assert_eq!(told(&board, &mut seen), (None, None, vec![b"2".to_vec(), b"1 again".to_vec()]));
        assert_eq!(told(&board, &mut seen), (None, None, vec![]));
        board.post_configuration(configuration(2), |index| index == service(2));
        assert_eq!(told(&board, &mut seen), (None, Some(2), vec![]));
        assert_eq!(told(&board, &mut Seen::default()), (Some(2), None, vec![b"2".to_vec()]));
    }

    #[test]
    fn a_change_is_for_those_who_saw_what_it_changes() {
        let board = Board::new(configuration(1));
        let (mut quick, mut slow) = (Seen::default(), Seen::default());
        for seen in [&mut quick, &mut slow] {
            assert_eq!(told(&board, seen), (Some(1), None, vec![]));
        }
        board.post_configuration(configuration(2), |_| true);
        assert_eq!(told(&board, &mut quick), (None, Some(2), vec![]));
        board.post_tables([(service(1), "1".into())]);
        board.post_configuration(configuration(3), |_| true);
        assert_eq!(told(&board, &mut quick), (None, Some(3), vec![b"1".to_vec()]));
        assert_eq!(told(&board, &mut slow), (Some(3), None, vec![b"1".to_vec()]));
    }
}
