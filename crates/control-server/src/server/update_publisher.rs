//! Publisher of the newest configuration and tables to all load balancers, encoded once. A slow session skips to the
//! newest updates, so nothing queues up.

use std::collections::{BTreeMap, HashMap};
use std::sync::OnceLock;

use coreward_wire::{FleetChange, FleetConfiguration, ServiceIndex};
use parking_lot::{Mutex, MutexGuard};
use prost::bytes::Bytes;
use tokio::sync::watch;

/// Publisher of the newest configuration, and of the newest table of each service, to all load balancers' sessions.
pub struct UpdatePublisher {
    snapshot: Mutex<PublishedState>,
    newest_update_sender: watch::Sender<u64>,
}

struct PublishedState {
    configuration: PublishedConfiguration,
    newest_update: u64,
    tables: HashMap<ServiceIndex, (u64, Bytes)>,
    /// Newest table of each service, encoded, by the number of the update that published it.
    tables_by_update: BTreeMap<(u64, ServiceIndex), Bytes>,
}

struct PublishedConfiguration {
    fleet: FleetConfiguration,
    update_number: u64,
    /// Encoded full configuration. It is encoded when a session first needs it.
    encoded: OnceLock<Bytes>,
    /// Number of the previous configuration's update, and the encoded changes since that update.
    change_since_update: Option<(u64, Bytes)>,
}

/// Updates that a session has not been sent yet.
pub struct PendingUpdates {
    /// Change of the configuration, which must be sent before the tables.
    pub configuration: Option<ConfigUpdate>,
    /// Encoded tables, at most one per service.
    pub tables: Vec<Bytes>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConfigUpdate {
    /// Encoded [`FleetConfiguration`].
    Whole(Bytes),
    /// Encoded [`FleetChange`].
    Change(Bytes),
}

/// Numbers of the newest updates that a session has been sent.
#[derive(Debug, Default)]
pub struct UpdateCursor {
    newest_update: u64,
    configuration_number: u64,
}

impl PublishedConfiguration {
    fn new(fleet: FleetConfiguration, update_number: u64, change_since_update: Option<(u64, Bytes)>) -> Self {
        Self { fleet, update_number, encoded: OnceLock::new(), change_since_update }
    }

    /// Returns the configuration update for a session that has the configuration of this update number.
    fn update_since(&self, cursor: u64) -> ConfigUpdate {
        match &self.change_since_update {
            Some((base, change)) if *base == cursor => ConfigUpdate::Change(change.clone()),
            _ => ConfigUpdate::Whole(self.encoded.get_or_init(|| self.fleet.encode(self.update_number)).clone()),
        }
    }
}

impl UpdatePublisher {
    pub fn new(configuration: FleetConfiguration) -> Self {
        let configuration = PublishedConfiguration::new(configuration, 1, None);
        let snapshot = PublishedState {
            configuration,
            newest_update: 1,
            tables: HashMap::new(),
            tables_by_update: BTreeMap::new(),
        };
        Self { snapshot: Mutex::new(snapshot), newest_update_sender: watch::Sender::new(1) }
    }

    fn snapshot(&self) -> MutexGuard<'_, PublishedState> {
        // Every call leaves a consistent snapshot.
        self.snapshot.lock()
    }

    fn publish(&self, change: impl FnOnce(&mut PublishedState, u64)) {
        let newest = {
            let mut snapshot = self.snapshot();
            snapshot.newest_update += 1;
            let newest = snapshot.newest_update;
            change(&mut snapshot, newest);
            newest
        };
        self.newest_update_sender.send_replace(newest);
    }

    pub fn publish_tables(&self, tables: impl IntoIterator<Item = (ServiceIndex, Bytes)>) {
        self.publish(|snapshot, number| {
            for (service, table) in tables {
                if let Some((before, _)) = snapshot.tables.insert(service, (number, table.clone())) {
                    snapshot.tables_by_update.remove(&(before, service));
                }
                snapshot.tables_by_update.insert((number, service), table);
            }
        });
    }

    /// Publishes a new configuration, and removes the tables of services for which `keep` returns false.
    pub fn publish_configuration(&self, configuration: FleetConfiguration, keep: impl Fn(ServiceIndex) -> bool) {
        self.publish(|snapshot, number| {
            let before = &snapshot.configuration;
            let change = FleetChange::between((before.update_number, &before.fleet), (number, &configuration));
            let change = Some((before.update_number, change.encode()));
            snapshot.configuration = PublishedConfiguration::new(configuration, number, change);
            snapshot.tables.retain(|service, _| keep(*service));
            snapshot.tables_by_update.retain(|(_, service), _| keep(*service));
        });
    }

    pub fn take_pending_updates(&self, cursor: &mut UpdateCursor) -> PendingUpdates {
        let snapshot = self.snapshot();
        let number = snapshot.configuration.update_number;
        let configuration =
            (number > cursor.newest_update).then(|| snapshot.configuration.update_since(cursor.configuration_number));
        let first = (cursor.newest_update + 1, ServiceIndex::FIRST);
        let tables = snapshot.tables_by_update.range(first..).map(|(_, table)| table.clone()).collect();
        (cursor.newest_update, cursor.configuration_number) = (snapshot.newest_update, number);
        PendingUpdates { configuration, tables }
    }

    /// Returns a receiver of the newest update's number, which changes with every update.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.newest_update_sender.subscribe()
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

    /// Takes the pending updates. Returns the generation of a full configuration or of a change, and the tables.
    fn received(publisher: &UpdatePublisher, cursor: &mut UpdateCursor) -> (Option<u64>, Option<u64>, Vec<Vec<u8>>) {
        let pending = publisher.take_pending_updates(cursor);
        let (mut whole, mut change) = (None, None);
        match pending.configuration {
            Some(ConfigUpdate::Whole(bytes)) => whole = Some(FleetConfiguration::decode(bytes).unwrap().1.generation),
            Some(ConfigUpdate::Change(bytes)) => {
                change = Some(FleetChange::decode(bytes).unwrap().0.configuration.generation)
            }
            None => {}
        }
        (whole, change, pending.tables.iter().map(|table| table.to_vec()).collect())
    }

    #[test]
    fn subscriber_gets_the_newest_update_once() {
        let publisher = UpdatePublisher::new(configuration(1));
        let mut cursor = UpdateCursor::default();
        assert_eq!(received(&publisher, &mut cursor), (Some(1), None, vec![]));
        publisher.publish_tables([(service(1), "1".into()), (service(2), "2".into())]);
        publisher.publish_tables([(service(1), "1 again".into())]);
        assert_eq!(received(&publisher, &mut cursor), (None, None, vec![b"2".to_vec(), b"1 again".to_vec()]));
        assert_eq!(received(&publisher, &mut cursor), (None, None, vec![]));
        publisher.publish_configuration(configuration(2), |index| index == service(2));
        assert_eq!(received(&publisher, &mut cursor), (None, Some(2), vec![]));
        assert_eq!(received(&publisher, &mut UpdateCursor::default()), (Some(2), None, vec![b"2".to_vec()]));
    }

    #[test]
    fn change_applies_to_its_base_generation_only() {
        let publisher = UpdatePublisher::new(configuration(1));
        let (mut quick, mut slow) = (UpdateCursor::default(), UpdateCursor::default());
        for cursor in [&mut quick, &mut slow] {
            assert_eq!(received(&publisher, cursor), (Some(1), None, vec![]));
        }
        publisher.publish_configuration(configuration(2), |_| true);
        assert_eq!(received(&publisher, &mut quick), (None, Some(2), vec![]));
        publisher.publish_tables([(service(1), "1".into())]);
        publisher.publish_configuration(configuration(3), |_| true);
        assert_eq!(received(&publisher, &mut quick), (None, Some(3), vec![b"1".to_vec()]));
        assert_eq!(received(&publisher, &mut slow), (Some(3), None, vec![b"1".to_vec()]));
    }
}
