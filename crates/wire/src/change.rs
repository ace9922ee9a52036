//! Changes of the fleet's configuration. They contain only the changed services, because a whole configuration with ten
//! thousand servers is large.

use std::collections::HashMap;

use prost::Message as _;
use prost::bytes::Bytes;

use crate::configuration::{FleetConfiguration, Service, ServiceIndex};
use crate::{UnusableService, WireError, WireErrorContext as _, v1};

/// Difference between two successive configurations of a stream.
#[derive(Debug, Clone, PartialEq)]
pub struct FleetChange {
    /// Number of the previous configuration in the stream.
    pub base_number: u64,
    /// Number of the next configuration in the stream.
    pub next_number: u64,
    /// The next configuration, with only the new and changed services.
    pub configuration: FleetConfiguration,
    /// Indexes of the removed services.
    pub removed_services: Vec<ServiceIndex>,
}

impl FleetChange {
    /// Returns the change from one numbered configuration to another.
    pub fn between((base, old): (u64, &FleetConfiguration), (next_number, new): (u64, &FleetConfiguration)) -> Self {
        let mut old_services: HashMap<ServiceIndex, &Service> =
            old.services.iter().map(|service| (service.index, service)).collect();
        let changed_services =
            new.services.iter().filter(|service| old_services.remove(&service.index) != Some(service));
        let services = changed_services.cloned().collect();
        let mut removed_services: Vec<ServiceIndex> = old_services.into_keys().collect();
        removed_services.sort();
        let configuration = FleetConfiguration {
            services,
            generation: new.generation,
            keys: new.keys,
            load_balancers: new.load_balancers.clone(),
            report_interval: new.report_interval,
            table_lifetime: new.table_lifetime,
        };
        Self { base_number: base, next_number, configuration, removed_services }
    }

    /// Returns the encoded message, which is made once for the streams of all load balancers.
    pub fn encode(&self) -> Bytes {
        let configuration = v1::FleetConfiguration { number: self.next_number, ..(&self.configuration).into() };
        let removed_service_index = self.removed_services.iter().map(|index| index.get().into()).collect();
        let message =
            v1::FleetChange { base: self.base_number, configuration: Some(configuration), removed_service_index };
        message.encode_to_vec().into()
    }

    /// Parses a change and returns it with its unusable services. Fails if `bytes` are not a consistent change.
    pub fn decode(bytes: Bytes) -> Result<(Self, Vec<UnusableService>), WireError> {
        let message = v1::FleetChange::decode(bytes).map_err(|error| WireError::new("change", error))?;
        let configuration = message.configuration.ok_or_else(|| WireError::missing("configuration"))?;
        let removed_indexes =
            message.removed_service_index.iter().map(|index| ServiceIndex::parse("removed_service_index", *index));
        let (base, number, removed_services) =
            (message.base, configuration.number, removed_indexes.collect::<Result<_, _>>()?);
        let (configuration, unusable_services) =
            FleetConfiguration::parse_message(configuration).within("configuration")?;
        Ok((Self { base_number: base, next_number: number, configuration, removed_services }, unusable_services))
    }

    /// Applies the change to `base_configuration`, which has the number `base_number`, and returns the next
    /// configuration.
    pub fn apply_to(self, base_configuration: FleetConfiguration) -> FleetConfiguration {
        let mut services = base_configuration.services;
        services.retain(|service| !self.removed_services.contains(&service.index));
        let mut positions: HashMap<ServiceIndex, usize> =
            services.iter().enumerate().map(|(position, service)| (service.index, position)).collect();
        for changed_service in self.configuration.services {
            match positions.remove(&changed_service.index) {
                Some(position) => services[position] = changed_service,
                None => services.push(changed_service),
            }
        }
        FleetConfiguration { services, ..self.configuration }
    }
}
