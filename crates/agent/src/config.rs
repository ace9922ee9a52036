//! The agent's file; docs/config.md is the reference for users.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use coreward_config::ConfigError;
use serde::Deserialize;

/// What the daemon is told. Services, ids and keys come from the controller.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The server's name in the controller's file.
    pub server: String,
    /// Where the controller listens.
    pub controller: SocketAddr,
    /// The Ethernet device on which the services' packets come and go.
    pub interface: String,
    /// A directory in a BPF file system: what packets need lives there and outlives the daemon.
    pub pin_directory: PathBuf,
    /// Set the fleet's RSS key and a balanced indirection table; without it they are only read.
    #[serde(default)]
    pub manage_rss: bool,
    /// Set net.ipv4.tcp_timestamps=2, which restoring by the clock needs; without it somebody else must have.
    #[serde(default = "yes")]
    pub manage_timestamps: bool,
    /// Which worker serves the connections of core k.
    #[serde(default)]
    pub steer: Steer,
    /// Where the load of the cores is found.
    #[serde(default)]
    pub load: Load,
    /// Where the RSS key and table are.
    #[serde(default)]
    pub rss: Rss,
}

fn yes() -> bool {
    true
}

/// Which worker of a server serves the connections that RSS sends to core k.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Steer {
    /// The one that may run on that core's CPU and on no other.
    #[default]
    Affinity,
    /// The one with the k-th listening socket: where cores are emulated, and workers are not pinned.
    Order,
    /// The kernel chooses.
    Off,
}

/// Where the load of the cores is found.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(tag = "source", rename_all = "lowercase", deny_unknown_fields)]
pub enum Load {
    /// Busy time of the CPU that serves each receive queue. (Braces, that unknown keys be refused here as well.)
    Cpu {},
    /// A file of little-endian u64, one per core: how long it has been busy (ns).
    Published {
        /// The file.
        path: PathBuf,
    },
}

/// Where the RSS key and table are.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(tag = "source", rename_all = "lowercase", deny_unknown_fields)]
pub enum Rss {
    /// In the NIC, by ETHTOOL_GRSSH.
    Ethtool {},
    /// In the testbed's emulated NIC.
    Testbed {
        /// Its registers: a pinned map of `struct emulated_rss`.
        path: PathBuf,
        /// Length of the table to set.
        #[serde(default = "testbed_entries")]
        entries: usize,
    },
}

impl Default for Load {
    fn default() -> Self {
        Load::Cpu {}
    }
}

impl Default for Rss {
    fn default() -> Self {
        Rss::Ethtool {}
    }
}

fn testbed_entries() -> usize {
    128
}

impl Config {
    /// # Errors
    /// When the file cannot be read or something in it is wrong.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        coreward_config::load(path)
    }
}

#[cfg(test)]
mod tests {
    use coreward_config::Source;

    use super::*;

    const SHORTEST: &str = r#"server = "s1"
controller = "10.1.0.1:7400"
interface = "eth0"
pin_directory = "/sys/fs/bpf/coreward/agent"
"#;

    fn parse(text: &str) -> Result<Config, String> {
        Source::from_text("agent.toml", text).parse().map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_not_said_has_a_default() {
        let config = parse(SHORTEST).unwrap();
        assert_eq!((config.manage_rss, config.manage_timestamps), (false, true));
        assert_eq!((config.steer, config.load, config.rss), (Steer::Affinity, Load::Cpu {}, Rss::Ethtool {}));
    }

    #[test]
    fn the_testbed_says_everything() {
        let text = format!(
            "{SHORTEST}manage_rss = true\nmanage_timestamps = false\nsteer = \"order\"\n\
             load = {{ source = \"published\", path = \"/tmp/busy\" }}\nrss = {{ source = \"testbed\", path = \"/r\" }}\n"
        );
        let config = parse(&text).unwrap();
        assert_eq!((config.manage_rss, config.manage_timestamps, config.steer), (true, false, Steer::Order));
        assert_eq!(config.load, Load::Published { path: "/tmp/busy".into() });
        assert_eq!(config.rss, Rss::Testbed { path: "/r".into(), entries: 128 });
    }

    #[test]
    fn errors_name_line_key_and_what_was_expected() {
        assert_eq!(
            parse(&format!("{SHORTEST}steer = \"yes\"\n")).unwrap_err(),
            "agent.toml:5:9: key `steer`: unknown variant `yes`, expected one of `affinity`, `order`, `off`"
        );
        assert_eq!(
            parse(&format!("{SHORTEST}manage_rs = true\n")).unwrap_err(),
            "agent.toml:5:1: key `manage_rs`: unknown field `manage_rs`, expected one of `server`, `controller`, \
             `interface`, `pin_directory`, `manage_rss`, `manage_timestamps`, `steer`, `load`, `rss`"
        );
        let error = parse(&format!("{SHORTEST}load = {{ source = \"published\" }}\n")).unwrap_err();
        assert!(error.starts_with("agent.toml:5:") && error.contains("missing field `path`"), "{error}");
        let error = parse(&format!("{SHORTEST}load = {{ source = \"cpu\", path = \"x\" }}\n")).unwrap_err();
        assert!(error.contains("unknown field `path`"), "{error}");
    }
}
