//! Consistency modes of services.

use coreward_model::consistency::{InvalidModeSetting, ServiceMode};

use crate::{WireError, v1};

impl From<ServiceMode> for v1::ServiceMode {
    fn from(mode: ServiceMode) -> Self {
        Self { settings: mode.settings().into_iter().map(|(key, value)| (key.to_owned(), value)).collect() }
    }
}

impl TryFrom<&v1::ServiceMode> for ServiceMode {
    type Error = WireError;

    fn try_from(message: &v1::ServiceMode) -> Result<Self, WireError> {
        let settings = message.settings.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        ServiceMode::from_settings(settings).map_err(|InvalidModeSetting { key, reason }| WireError::new(key, reason))
    }
}
