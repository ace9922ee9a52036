//! Consistency modes of services.

use coreward_model::consistency::{InvalidModeSetting, ServiceSettings};

use crate::{WireError, v1};

impl From<ServiceSettings> for v1::ServiceSettings {
    fn from(mode: ServiceSettings) -> Self {
        Self { settings: mode.setting_pairs().into_iter().map(|(key, value)| (key.to_owned(), value)).collect() }
    }
}

impl TryFrom<&v1::ServiceSettings> for ServiceSettings {
    type Error = WireError;

    fn try_from(message: &v1::ServiceSettings) -> Result<Self, WireError> {
        let settings = message.settings.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        ServiceSettings::from_settings(settings)
            .map_err(|InvalidModeSetting { key, reason }| WireError::new(key, reason))
    }
}
