//! The server's RSS: read, set, put back, and checked against what arrives.
//!
//! * [`ethtool`]: a real NIC
//! * [`testbed`]: the testbed's emulated one
//! * [`manager`]: reads it again and again; sets the fleet's key and a balanced table where it may
//! * [`input`]: which transform of the input explains where packets arrive
//! * [`rss_verifier`]: whether what the NIC shows is in force

pub mod ethtool;
pub mod input;
pub mod manager;
pub mod rss_verifier;
pub mod testbed;

use coreward_model::rss::{IndirectionTable, IndirectionTableError, InputTransform, Rss, RssKey, RssKeyLength};
use serde::{Deserialize, Serialize};

/// What a NIC holds, or is to hold. As it is, whether or not we can use it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RssSettings {
    /// The key; `None`: cannot be read there, or is not to be set.
    pub key: Option<Vec<u8>>,
    /// The receive queue per entry; empty: is not to be set.
    pub indirection_table: Vec<u32>,
    /// What is done to addresses and ports before they are hashed, as ethtool numbers it; 0 where the kernel does not know of it.
    #[serde(default)]
    pub input_transform: u8,
}

/// Why core-aware placement cannot know where this NIC sends a connection.
#[derive(Debug, thiserror::Error)]
pub enum RssUnknown {
    /// One queue, or a driver without RSS.
    #[error("{0} has no RSS indirection table that ethtool shows")]
    Unsupported(String),
    /// Not a Toeplitz hash, or a changed input.
    #[error("{interface} hashes by {found}: expected Toeplitz over addresses and ports")]
    OtherHash {
        /// The device.
        interface: String,
        /// What it does instead.
        found: String,
    },
    /// A table that is indexed in another way than by low bits.
    #[error("{interface}: {source}")]
    Table {
        /// The device.
        interface: String,
        /// What is wrong with it.
        source: IndirectionTableError,
    },
    /// A key that is too short or too long.
    #[error("{interface}: {source}")]
    Key {
        /// The device.
        interface: String,
        /// What is wrong with it.
        source: RssKeyLength,
    },
    /// The kernel or the file system says no.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: std::io::Error,
    },
}

impl RssSettings {
    /// Both together, checked. `fallback_key` is taken where the NIC's cannot be read.
    ///
    /// # Errors
    /// When the table's or the key's length is of no use.
    pub fn usable(&self, interface: &str, fallback_key: &[u8]) -> Result<Rss, RssUnknown> {
        let key = RssKey::new(self.key.as_deref().unwrap_or(fallback_key))
            .map_err(|source| RssUnknown::Key { interface: interface.to_owned(), source })?;
        let indirection_table = IndirectionTable::new(&self.indirection_table)
            .map_err(|source| RssUnknown::Table { interface: interface.to_owned(), source })?;
        let input =
            InputTransform::try_from(u32::from(self.input_transform)).map_err(|error| RssUnknown::OtherHash {
                interface: interface.to_owned(),
                found: format!("{error} (`ethtool -x {interface}`)"),
            })?;
        Ok(Rss { key: key.with_input(input), indirection_table })
    }
}

/// A NIC, as far as RSS goes.
pub trait RssDevice: Send {
    /// Where it is read, as reports say it: "ethtool" or "testbed emulation".
    fn source(&self) -> &'static str;

    /// Number of receive queues, at least 1.
    fn receive_queues(&self) -> u16;

    /// What it holds, as it is.
    ///
    /// # Errors
    /// When the driver does not tell.
    fn settings(&self) -> Result<RssSettings, RssUnknown>;

    /// What it does with a TCP packet, if that can be known.
    ///
    /// # Errors
    /// When it cannot.
    fn read(&self) -> Result<Rss, RssUnknown>;

    /// How many entries a table to be set must have.
    ///
    /// # Errors
    /// When the driver does not tell.
    fn table_entries(&self) -> Result<usize, RssUnknown>;

    /// Sets what is given; a key where the NIC takes none is left out.
    ///
    /// # Errors
    /// When the driver refuses.
    fn write(&mut self, settings: &RssSettings) -> Result<(), RssUnknown>;
}
