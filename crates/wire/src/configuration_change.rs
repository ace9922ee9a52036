//! Changes of the fleet's configuration. They contain only the changed services, because a whole configuration with ten
//! thousand servers is large.

use std::collections::HashMap;

use prost::Message as _;
use prost::bytes::Bytes;

use crate::configuration::{FleetConfiguration, Service, ServiceIndex};
use crate::{UnusableService, WireError, WireErrorContext as _, v1};

/// Difference between two successive fleet configurations in a stream.
#[derive(Debug, Clone, PartialEq)]
pub struct FleetConfigurationChange {
    /// Number that the configuration before the change has in the stream.
    pub base_configuration_number: u64,
    /// Number that the configuration after the change has in the stream.
    pub next_configuration_number: u64,
    /// Configuration after the change, with only the new and changed services.
    pub configuration: FleetConfiguration,
    /// Indexes of the removed services.
    pub removed_service_indexes: Vec<ServiceIndex>,
}

impl FleetConfigurationChange {
    /// Returns the change from `old_configuration` to `new_configuration`, each with its number in the stream.
    pub fn between_configurations(
        (base_configuration_number, old_configuration): (u64, &FleetConfiguration),
        (next_configuration_number, new_configuration): (u64, &FleetConfiguration),
    ) -> Self {
        let mut unmatched_old_services: HashMap<ServiceIndex, &Service> =
            old_configuration.services.iter().map(|service| (service.index, service)).collect();
        let changed_services = new_configuration
            .services
            .iter()
            .filter(|service| unmatched_old_services.remove(&service.index) != Some(service));
        let services = changed_services.cloned().collect();
        let mut removed_service_indexes: Vec<ServiceIndex> = unmatched_old_services.into_keys().collect();
        removed_service_indexes.sort();
        let configuration = FleetConfiguration {
            services,
            generation: new_configuration.generation,
            cookie_keys: new_configuration.cookie_keys,
            load_balancers: new_configuration.load_balancers.clone(),
            report_interval: new_configuration.report_interval,
            table_lifetime: new_configuration.table_lifetime,
        };
        Self { base_configuration_number, next_configuration_number, configuration, removed_service_indexes }
    }

    /// Returns the encoded message, which is shared by the streams of all load balancers.
    pub fn encode(&self) -> Bytes {
        let configuration =
            v1::FleetConfiguration { number: self.next_configuration_number, ..(&self.configuration).into() };
        let removed_service_index = self.removed_service_indexes.iter().map(|index| index.get().into()).collect();
        let message = v1::FleetChange {
            base: self.base_configuration_number,
            configuration: Some(configuration),
            removed_service_index,
        };
        message.encode_to_vec().into()
    }

    /// Parses a change and returns it with the services that this version cannot use. Fails if `bytes` are not a
    /// consistent change.
    pub fn decode(bytes: Bytes) -> Result<(Self, Vec<UnusableService>), WireError> {
        let message = v1::FleetChange::decode(bytes).map_err(|error| WireError::new("change", error))?;
        let configuration = message.configuration.ok_or_else(|| WireError::missing("configuration"))?;
        let removed_indexes =
            message.removed_service_index.iter().map(|index| ServiceIndex::parse("removed_service_index", *index));
        let (base, number, removed_services) =
            (message.base, configuration.number, removed_indexes.collect::<Result<_, _>>()?);
        let (configuration, unusable_services) =
            FleetConfiguration::parse_message(configuration).with_field_prefix("configuration")?;
        Ok((
            Self {
                base_configuration_number: base,
                next_configuration_number: number,
                configuration,
                removed_service_indexes: removed_services,
            },
            unusable_services,
        ))
    }

    /// Applies the change to `base_configuration`, whose number is `base_configuration_number`, and returns the next
    /// configuration.
    pub fn apply_to(self, base_configuration: FleetConfiguration) -> FleetConfiguration {
        let mut services = base_configuration.services;
        services.retain(|service| !self.removed_service_indexes.contains(&service.index));
        let mut service_position_by_index: HashMap<ServiceIndex, usize> =
            services.iter().enumerate().map(|(position, service)| (service.index, position)).collect();
        for changed_service in self.configuration.services {
            match service_position_by_index.remove(&changed_service.index) {
                Some(position) => services[position] = changed_service,
                None => services.push(changed_service),
            }
        }
        FleetConfiguration { services, ..self.configuration }
    }
}
