//! The load balancer's file; docs/config.md is the reference for users.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use coreward_config::ConfigError;
use coreward_dataplane::lb::{MAX_FLOW_TABLE_ENTRIES, Options};
use coreward_model::connection_table::TableSize;
use serde::de::{Deserialize, Deserializer, Error as _};

/// What the daemon is told. Everything else comes from the controller.
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// What `coreward status` calls it.
    pub name: String,
    /// Where the controller listens.
    pub controller: SocketAddr,
    /// The interface that packets for VIPs come in by, and leave by.
    pub interface: String,
    /// A directory in a BPF file system: the data plane lives there and outlives the daemon.
    pub pin_directory: PathBuf,
    /// Where in the kernel the program runs.
    #[serde(default)]
    pub xdp_mode: XdpMode,
    /// Where other load balancers reach this one; without it the interface's first IPv4 address.
    pub address: Option<Ipv4Addr>,
    /// Room for connections that carry no cookie.
    #[serde(default)]
    pub flow_table: FlowTableEntries,
    /// Room for connections of stateful services.
    #[serde(default)]
    pub connection_table: ConnectionTableEntries,
}

/// How many entries the connection table has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ConnectionTableEntries(pub TableSize);

impl<'de> Deserialize<'de> for ConnectionTableEntries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        TableSize::try_from(u64::deserialize(deserializer)?).map(Self).map_err(D::Error::custom)
    }
}

/// How many entries the flow table has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowTableEntries(pub u32);

impl Default for FlowTableEntries {
    fn default() -> Self {
        Self(Options::default().flow_table_entries)
    }
}

impl<'de> Deserialize<'de> for FlowTableEntries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let entries = u64::deserialize(deserializer)?;
        let known = u32::try_from(entries).ok().filter(|entries| (1..=MAX_FLOW_TABLE_ENTRIES).contains(entries));
        let expected = || format!("a flow table of {entries} entries: expected 1 to {MAX_FLOW_TABLE_ENTRIES}");
        known.map(Self).ok_or_else(|| D::Error::custom(expected()))
    }
}

/// Where in the kernel the program runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum XdpMode {
    /// In the driver, or not at all.
    Native,
    /// After the driver, slower, with any interface.
    Generic,
    /// Native; where the driver cannot, generic with a warning.
    #[default]
    Auto,
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

    const GOOD: &str = r#"name = "lb1"
controller = "10.1.0.1:7400"
interface = "eth0"
pin_directory = "/sys/fs/bpf/coreward/lb1"
"#;

    fn parse(text: &str) -> Result<Config, String> {
        Source::from_text("lb.toml", text).parse().map_err(|error| error.to_string())
    }

    #[test]
    fn the_mode_is_automatic_unless_said() {
        assert_eq!(parse(GOOD).unwrap().xdp_mode, XdpMode::Auto);
        assert_eq!(parse(&format!("{GOOD}xdp_mode = \"native\"\n")).unwrap().xdp_mode, XdpMode::Native);
    }

    #[test]
    fn tables_and_addresses_have_defaults() {
        let config = parse(GOOD).unwrap();
        assert_eq!((config.address, config.flow_table.0), (None, 262_144));
        assert_eq!(config.connection_table.0.entries(), 262_144);
        let config = parse(&format!("{GOOD}address = \"10.2.0.1\"\nflow_table = 1000\n")).unwrap();
        assert_eq!((config.address, config.flow_table.0), (Some(Ipv4Addr::new(10, 2, 0, 1)), 1000));
    }

    #[test]
    fn errors_name_line_key_and_what_was_expected() {
        assert_eq!(
            parse(&format!("{GOOD}xdp_mode = \"driver\"\n")).unwrap_err(),
            "lb.toml:5:12: key `xdp_mode`: unknown variant `driver`, expected one of `native`, `generic`, `auto`"
        );
        assert_eq!(
            parse(&format!("{GOOD}interfaces = \"eth1\"\n")).unwrap_err(),
            "lb.toml:5:1: key `interfaces`: unknown field `interfaces`, expected one of `name`, `controller`, \
             `interface`, `pin_directory`, `xdp_mode`, `address`, `flow_table`, `connection_table`"
        );
        assert_eq!(
            parse(&format!("{GOOD}flow_table = 0\n")).unwrap_err(),
            "lb.toml:5:14: key `flow_table`: a flow table of 0 entries: expected 1 to 16777216"
        );
        let error = parse(&format!("{GOOD}connection_table = 1000\n")).unwrap_err();
        assert!(error.starts_with("lb.toml:5:20: key `connection_table`: ") && error.contains("1000"), "{error}");
        assert_eq!(
            parse(&format!("{GOOD}address = \"10.2.0\"\n")).unwrap_err(),
            "lb.toml:5:11: key `address`: invalid IPv4 address syntax"
        );
        assert_eq!(
            parse(&GOOD.replace("10.1.0.1:7400", "10.1.0.1")).unwrap_err(),
            "lb.toml:2:14: key `controller`: invalid socket address syntax"
        );
    }
}
