//! Publisher of the newest configuration and tables, which are encoded once for all load balancers. A slow session
//! skips to the newest updates, so that no queue grows.

use std::collections::{BTreeMap, HashMap};
use std::sync::OnceLock;

use coreward_wire::{FleetConfiguration, FleetConfigurationChange, ServiceIndex};
use parking_lot::{Mutex, MutexGuard};
use prost::bytes::Bytes;
use tokio::sync::watch;

/// Publisher of the newest configuration and of each service's newest table to all load balancers' sessions.
pub struct UpdatePublisher {
    published_state: Mutex<NewestPublishedUpdates>,
    newest_update_sender: watch::Sender<u64>,
}

struct NewestPublishedUpdates {
    configuration: PublishedConfiguration,
    newest_update_number: u64,
    update_and_table_by_service: HashMap<ServiceIndex, (u64, Bytes)>,
    /// Newest encoded table of each service, by the number of the update that published it.
    tables_by_update: BTreeMap<(u64, ServiceIndex), Bytes>,
}

struct PublishedConfiguration {
    fleet: FleetConfiguration,
    update_number: u64,
    /// Encoded full configuration, which is made when a session first needs it.
    encoded_configuration: OnceLock<Bytes>,
    /// Number of the previous configuration's update, and the encoded changes since that update.
    base_update_and_change: Option<(u64, Bytes)>,
}

/// Updates that have not been sent to a session yet.
pub struct PendingSessionUpdates {
    /// Change of the configuration, which must be sent before the tables.
    pub configuration: Option<EncodedConfigUpdate>,
    /// Encoded tables, at most one per service.
    pub tables: Vec<Bytes>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EncodedConfigUpdate {
    /// Encoded [`FleetConfiguration`].
    Full(Bytes),
    /// Encoded [`FleetConfigurationChange`].
    Change(Bytes),
}

/// Numbers of the newest updates that have been sent to a session.
#[derive(Debug, Default)]
pub struct SentUpdateCursor {
    newest_update_number: u64,
    configuration_update_number: u64,
}

impl PublishedConfiguration {
    fn new(fleet: FleetConfiguration, update_number: u64, base_update_and_change: Option<(u64, Bytes)>) -> Self {
        Self { fleet, update_number, encoded_configuration: OnceLock::new(), base_update_and_change }
    }

    /// Returns the configuration update for a session that has the configuration of update `update_number`.
    fn config_update_since(&self, update_number: u64) -> EncodedConfigUpdate {
        match &self.base_update_and_change {
            Some((base, change)) if *base == update_number => EncodedConfigUpdate::Change(change.clone()),
            _ => EncodedConfigUpdate::Full(
                self.encoded_configuration.get_or_init(|| self.fleet.encode(self.update_number)).clone(),
            ),
        }
    }
}

impl UpdatePublisher {
    pub fn new(configuration: FleetConfiguration) -> Self {
        let configuration = PublishedConfiguration::new(configuration, 1, None);
        let published_state = NewestPublishedUpdates {
            configuration,
            newest_update_number: 1,
            update_and_table_by_service: HashMap::new(),
            tables_by_update: BTreeMap::new(),
        };
        Self { published_state: Mutex::new(published_state), newest_update_sender: watch::Sender::new(1) }
    }

    fn lock_state(&self) -> MutexGuard<'_, NewestPublishedUpdates> {
        // Every call leaves a consistent snapshot.
        self.published_state.lock()
    }

    fn publish_change(&self, change: impl FnOnce(&mut NewestPublishedUpdates, u64)) {
        let newest_update_number = {
            let mut published_state = self.lock_state();
            published_state.newest_update_number += 1;
            let newest_update_number = published_state.newest_update_number;
            change(&mut published_state, newest_update_number);
            newest_update_number
        };
        self.newest_update_sender.send_replace(newest_update_number);
    }

    pub fn publish_tables(&self, tables: impl IntoIterator<Item = (ServiceIndex, Bytes)>) {
        self.publish_change(|snapshot, number| {
            for (service, table) in tables {
                if let Some((before, _)) = snapshot.update_and_table_by_service.insert(service, (number, table.clone()))
                {
                    snapshot.tables_by_update.remove(&(before, service));
                }
                snapshot.tables_by_update.insert((number, service), table);
            }
        });
    }

    /// Publishes a new configuration, and removes the tables of services for which `keep` returns false.
    pub fn publish_configuration(&self, configuration: FleetConfiguration, keep: impl Fn(ServiceIndex) -> bool) {
        self.publish_change(|snapshot, number| {
            let previous_configuration = &snapshot.configuration;
            let fleet_change = FleetConfigurationChange::between_configurations(
                (previous_configuration.update_number, &previous_configuration.fleet),
                (number, &configuration),
            );
            let encoded_change = Some((previous_configuration.update_number, fleet_change.encode()));
            snapshot.configuration = PublishedConfiguration::new(configuration, number, encoded_change);
            snapshot.update_and_table_by_service.retain(|service, _| keep(*service));
            snapshot.tables_by_update.retain(|(_, service), _| keep(*service));
        });
    }

    pub fn take_pending_updates(&self, cursor: &mut SentUpdateCursor) -> PendingSessionUpdates {
        let published_state = self.lock_state();
        let update_number = published_state.configuration.update_number;
        let configuration = (update_number > cursor.newest_update_number)
            .then(|| published_state.configuration.config_update_since(cursor.configuration_update_number));
        let first_table_key = (cursor.newest_update_number + 1, ServiceIndex::FIRST);
        let tables =
            published_state.tables_by_update.range(first_table_key..).map(|(_, table)| table.clone()).collect();
        (cursor.newest_update_number, cursor.configuration_update_number) =
            (published_state.newest_update_number, update_number);
        PendingSessionUpdates { configuration, tables }
    }

    /// Returns a receiver of the newest update's number, which changes with every update.
    pub fn subscribe_to_update_number(&self) -> watch::Receiver<u64> {
        self.newest_update_sender.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use coreward_model::cookie::{CookieKey, CookieKeyIndex, FleetCookieKeys};

    use super::*;

    fn to_service_index(index: u32) -> ServiceIndex {
        ServiceIndex::new(index).unwrap()
    }

    fn build_fleet_configuration(generation: u64) -> FleetConfiguration {
        let key = CookieKey { k0: 1, k1: 2 };
        FleetConfiguration {
            generation,
            cookie_keys: FleetCookieKeys { keys: [key; 2], current_key_index: CookieKeyIndex::First },
            services: Vec::new(),
            load_balancers: Vec::new(),
            report_interval: Duration::from_millis(100),
            table_lifetime: Duration::from_secs(10),
        }
    }

    /// Takes the pending updates. Returns the generation of the full configuration or of the configuration change, if
    /// any, and the tables.
    fn take_update_generations_and_tables(
        publisher: &UpdatePublisher,
        cursor: &mut SentUpdateCursor,
    ) -> (Option<u64>, Option<u64>, Vec<Vec<u8>>) {
        let pending_updates = publisher.take_pending_updates(cursor);
        let (mut whole_generation, mut change_generation) = (None, None);
        match pending_updates.configuration {
            Some(EncodedConfigUpdate::Full(bytes)) => {
                whole_generation = Some(FleetConfiguration::decode(bytes).unwrap().1.generation)
            }
            Some(EncodedConfigUpdate::Change(bytes)) => {
                change_generation = Some(FleetConfigurationChange::decode(bytes).unwrap().0.configuration.generation)
            }
            None => {}
        }
        (whole_generation, change_generation, pending_updates.tables.iter().map(|table| table.to_vec()).collect())
    }

    #[test]
    fn subscriber_gets_the_newest_update_once() {
        let publisher = UpdatePublisher::new(build_fleet_configuration(1));
        let mut cursor = SentUpdateCursor::default();
        assert_eq!(take_update_generations_and_tables(&publisher, &mut cursor), (Some(1), None, vec![]));
        publisher.publish_tables([(to_service_index(1), "1".into()), (to_service_index(2), "2".into())]);
        publisher.publish_tables([(to_service_index(1), "1 again".into())]);
        assert_eq!(
            take_update_generations_and_tables(&publisher, &mut cursor),
            (None, None, vec![b"2".to_vec(), b"1 again".to_vec()])
        );
        assert_eq!(take_update_generations_and_tables(&publisher, &mut cursor), (None, None, vec![]));
        publisher.publish_configuration(build_fleet_configuration(2), |index| index == to_service_index(2));
        assert_eq!(take_update_generations_and_tables(&publisher, &mut cursor), (None, Some(2), vec![]));
        assert_eq!(
            take_update_generations_and_tables(&publisher, &mut SentUpdateCursor::default()),
            (Some(2), None, vec![b"2".to_vec()])
        );
    }

    #[test]
    fn configuration_change_applies_to_its_base_generation_only() {
        let publisher = UpdatePublisher::new(build_fleet_configuration(1));
        let (mut fast_cursor, mut slow_cursor) = (SentUpdateCursor::default(), SentUpdateCursor::default());
        for cursor in [&mut fast_cursor, &mut slow_cursor] {
            assert_eq!(take_update_generations_and_tables(&publisher, cursor), (Some(1), None, vec![]));
        }
        publisher.publish_configuration(build_fleet_configuration(2), |_| true);
        assert_eq!(take_update_generations_and_tables(&publisher, &mut fast_cursor), (None, Some(2), vec![]));
        publisher.publish_tables([(to_service_index(1), "1".into())]);
        publisher.publish_configuration(build_fleet_configuration(3), |_| true);
        assert_eq!(
            take_update_generations_and_tables(&publisher, &mut fast_cursor),
            (None, Some(3), vec![b"1".to_vec()])
        );
        assert_eq!(
            take_update_generations_and_tables(&publisher, &mut slow_cursor),
            (Some(3), None, vec![b"1".to_vec()])
        );
    }
}
