//! Reads, sets and restores the RSS settings of the server's NIC, and verifies them by the packets that arrive.
//!
//! * [`ethtool`]: settings of real NICs
//! * [`testbed`]: settings of the testbed's emulated NIC
//! * [`manager`]: periodic reading, and with `manage_rss` setting the fleet's key and a balanced table
//! * [`input`]: detection of the NIC's input transform by the packets' queues
//! * [`rss_verifier`]: test whether the NIC uses the table that it shows

pub mod ethtool;
pub mod input;
pub mod manager;
pub mod rss_verifier;
pub mod testbed;

use coreward_model::rss::{
    IndirectionTable, IndirectionTableError, RssConfig, RssInputTransform, RssKey, RssKeyLengthError,
};
use serde::{Deserialize, Serialize};

/// RSS settings that the NIC's driver reports or is to set, before any check.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RssSettings {
    /// RSS key, or `None` if the driver reports none, or is to keep its key.
    pub key: Option<Vec<u8>>,
    /// Receive queue of each entry of the indirection table. If it is empty, the driver is to keep its table.
    pub indirection_table: Vec<u32>,
    /// Transform of addresses and ports before hashing, as ethtool's number. 0 if the kernel does not report it.
    #[serde(default)]
    pub input_transform: u8,
}

/// Reason why the receive queue that the NIC selects for a connection cannot be predicted.
#[derive(Debug, thiserror::Error)]
pub enum RssError {
    /// The NIC has only one receive queue, or its driver does not support RSS.
    #[error("{0} has no RSS indirection table that ethtool shows")]
    NoIndirectionTable(String),
    /// The NIC uses a hash function other than Toeplitz, or does not hash exactly the addresses and ports.
    #[error("{interface} hashes by {found}: expected Toeplitz over addresses and ports")]
    UnsupportedHash { interface: String, found: String },
    /// The number of entries or a queue number in the indirection table is invalid.
    #[error("{interface}: {source}")]
    InvalidIndirectionTable { interface: String, source: IndirectionTableError },
    /// The RSS key has an unsupported length.
    #[error("{interface}: {source}")]
    InvalidKey { interface: String, source: RssKeyLengthError },
    /// The kernel or the file system returned an error.
    #[error("{operation}: {source}")]
    Io {
        /// Name of the operation that failed.
        operation: String,
        source: std::io::Error,
    },
}

impl RssSettings {
    /// Returns the checked settings, with `fallback_key` if the key could not be read. Fails if the indirection table
    /// or the key has an invalid length.
    pub fn to_checked_config(&self, interface: &str, fallback_key: &[u8]) -> Result<RssConfig, RssError> {
        let rss_key = RssKey::new(self.key.as_deref().unwrap_or(fallback_key))
            .map_err(|source| RssError::InvalidKey { interface: interface.to_owned(), source })?;
        let indirection_table = IndirectionTable::new(&self.indirection_table)
            .map_err(|source| RssError::InvalidIndirectionTable { interface: interface.to_owned(), source })?;
        let input_transform = RssInputTransform::try_from(u32::from(self.input_transform)).map_err(|error| {
            RssError::UnsupportedHash {
                interface: interface.to_owned(),
                found: format!("{error} (`ethtool -x {interface}`)"),
            }
        })?;
        Ok(RssConfig { key: rss_key.with_input_transform(input_transform), indirection_table })
    }
}

pub trait RssDevice: Send {
    /// Returns the source of the settings, as reports name it: "ethtool" or "testbed emulation".
    fn settings_source_name(&self) -> &'static str;

    /// Returns the name of the NIC's network interface.
    fn interface_name(&self) -> &str;

    /// Returns the number of receive queues, at least 1.
    fn receive_queue_count(&self) -> u16;

    /// Returns the NIC's settings without checks. Fails if the driver does not report them.
    fn read_unchecked_settings(&self) -> Result<RssSettings, RssError>;

    /// Returns the checked RSS configuration with which the NIC distributes TCP packets. Fails if it is unknown.
    fn read_config(&self) -> Result<RssConfig, RssError>;

    /// Returns the number of table entries that `write_settings` must set. Fails if the driver does not report it.
    fn table_entry_count(&self) -> Result<usize, RssError>;

    /// Writes the settings to the NIC, but no key if the NIC accepts none. Fails if the driver rejects them.
    fn write_settings(&mut self, settings: &RssSettings) -> Result<(), RssError>;
}
