//! Consistency modes of services.

use coreward_model::consistency::{InvalidServiceModeSetting, ServiceSettings};

use crate::{WireError, v1};

impl From<ServiceSettings> for v1::ServiceSettings {
    fn from(mode: ServiceSettings) -> Self {
        Self { settings: mode.key_value_pairs().into_iter().map(|(key, value)| (key.to_owned(), value)).collect() }
    }
}

impl TryFrom<&v1::ServiceSettings> for ServiceSettings {
    type Error = WireError;

    fn try_from(message: &v1::ServiceSettings) -> Result<Self, WireError> {
        let settings = message.settings.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        ServiceSettings::from_key_value_pairs(settings)
            .map_err(|InvalidServiceModeSetting { key, reason }| WireError::new(key, reason))
    }
}
