//! Saves the last applied configuration in a file. A daemon that starts without a controller reads it, because it needs
//! the configuration for health checks and the connection table.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use coreward_wire::{FleetConfiguration, v1};
use prost::Message as _;
use prost::bytes::Bytes;

use crate::forwarder::Forwarder;

/// File that holds the last configuration. It contains the cookie keys, so only its owner may read it.
pub struct SavedConfigurationFile {
    file_path: PathBuf,
    /// Applied configuration that has not been written to the file yet.
    unwritten_configuration: Option<FleetConfiguration>,
    last_file_error: Option<String>,
}

impl SavedConfigurationFile {
    pub fn new(state_directory: &Path, name: &str) -> Self {
        Self {
            file_path: state_directory.join(format!("{name}.configuration")),
            unwritten_configuration: None,
            last_file_error: None,
        }
    }

    /// Applies the saved configuration to `forwarder`, if this version of coreward can read it.
    pub fn restore_into(&mut self, forwarder: &mut Forwarder) {
        let restore_result = self.read_file().and_then(|configuration| {
            let Some(configuration) = configuration else { return Ok(()) };
            let generation = configuration.generation;
            forwarder.restore_saved_configuration(configuration)?;
            tracing::info!(
                event = "configuration-restored",
                generation,
                file = %self.file_path.display(),
                "the load balancer uses its saved configuration until a controller sends a configuration"
            );
            Ok(())
        });
        if let Some(error) = self.record_file_result(restore_result.context("the last configuration is not restored")) {
            tracing::warn!(
                event = "configuration-not-restored",
                file = %self.file_path.display(),
                error,
                "the load balancer cannot restore its saved configuration and waits for a controller's configuration"
            );
        }
    }

    /// Writes the applied configuration if it has changed or the last write failed. Called once a second.
    pub fn save_if_changed(&mut self, forwarder: &mut Forwarder) {
        self.save_changed_configuration(forwarder.take_changed_configuration());
    }

    /// Writes the configuration `changed_configuration`, or retries a failed write if there is none.
    /// `changed_configuration` is `None` if the applied configuration has not changed since the last call.
    fn save_changed_configuration(&mut self, changed_configuration: Option<FleetConfiguration>) {
        let Some(configuration) = changed_configuration.or_else(|| self.unwritten_configuration.take()) else { return };
        let write_result =
            self.write_file(&configuration).context("the configuration is not saved for a restart without controller");
        if write_result.is_err() {
            self.unwritten_configuration = Some(configuration);
        } else if self.unwritten_configuration.take().is_some() || self.last_file_error.is_some() {
            tracing::info!(
                event = "configuration-saved",
                generation = configuration.generation,
                file = %self.file_path.display(),
                "the load balancer has saved its configuration, for use after a restart without a controller"
            );
        }
        if let Some(error) = self.record_file_result(write_result) {
            tracing::warn!(
                event = "configuration-not-saved",
                file = %self.file_path.display(),
                error,
                "the load balancer cannot save its configuration for use after a restart: it retries every second"
            );
        }
    }

    pub fn last_file_error(&self) -> Option<&str> {
        self.last_file_error.as_deref()
    }

    fn read_file(&self) -> anyhow::Result<Option<FleetConfiguration>> {
        match fs::read(&self.file_path) {
            Ok(content) => {
                let configuration = FleetConfiguration::decode(Bytes::from(content));
                let (_, configuration, _) = configuration.with_context(|| self.file_path.display().to_string())?;
                Ok(Some(configuration))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| self.file_path.display().to_string()),
        }
    }

    fn write_file(&self, configuration: &FleetConfiguration) -> anyhow::Result<()> {
        let parent_directory = self
            .file_path
            .parent()
            .with_context(|| format!("{}: expected a path with a directory", self.file_path.display()))?;
        fs::create_dir_all(parent_directory).with_context(|| parent_directory.display().to_string())?;
        coreward_tls::write_secret(&self.file_path, v1::FleetConfiguration::from(configuration).encode_to_vec())
    }

    /// Stores the error of a read or write, and returns it if it is new. Each error is thus logged only once.
    fn record_file_result(&mut self, outcome: anyhow::Result<()>) -> Option<String> {
        let problem = outcome.err().map(|error| format!("{error:#}"));
        let previous_error = std::mem::replace(&mut self.last_file_error, problem.clone());
        problem.filter(|problem| previous_error.as_ref() != Some(problem))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::time::Duration;

    use coreward_model::cookie::{CookieKey, CookieKeyIndex, FleetCookieKeys};

    use super::*;

    fn fleet_configuration() -> FleetConfiguration {
        FleetConfiguration {
            generation: 7,
            cookie_keys: FleetCookieKeys {
                keys: [CookieKey { k0: 1, k1: 2 }, CookieKey { k0: 3, k1: 4 }],
                current_key_index: CookieKeyIndex::First,
            },
            services: vec![],
            load_balancers: vec![],
            report_interval: Duration::from_millis(50),
            table_lifetime: Duration::from_secs(10),
        }
    }

    #[test]
    fn saved_configuration_can_be_read_by_its_owner_only() {
        let directory = tempfile::tempdir().unwrap();
        let saved_file = SavedConfigurationFile::new(&directory.path().join("made"), "lb1");
        assert_eq!(saved_file.read_file().unwrap(), None);
        saved_file.write_file(&fleet_configuration()).unwrap();
        assert_eq!(saved_file.read_file().unwrap(), Some(fleet_configuration()));
        let permission_bits = fs::metadata(&saved_file.file_path).unwrap().permissions().mode();
        assert_eq!(permission_bits & 0o777, 0o600);
    }

    #[test]
    fn configuration_error_names_the_damaged_file() {
        let directory = tempfile::tempdir().unwrap();
        let saved_file = SavedConfigurationFile::new(directory.path(), "lb1");
        fs::write(&saved_file.file_path, "not a configuration").unwrap();
        let error = format!("{:#}", saved_file.read_file().unwrap_err());
        assert!(error.contains("lb1.configuration"), "{error}");
    }
}
