//! The load balancer's file; docs/config.md is the reference for users.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use coreward_config::ConfigError;

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
    fn errors_name_line_key_and_what_was_expected() {
        assert_eq!(
            parse(&format!("{GOOD}xdp_mode = \"driver\"\n")).unwrap_err(),
            "lb.toml:5:12: key `xdp_mode`: unknown variant `driver`, expected one of `native`, `generic`, `auto`"
        );
        assert_eq!(
            parse(&format!("{GOOD}interfaces = \"eth1\"\n")).unwrap_err(),
            "lb.toml:5:1: key `interfaces`: unknown field `interfaces`, expected one of `name`, `controller`, \
             `interface`, `pin_directory`, `xdp_mode`"
        );
        assert_eq!(
            parse(&GOOD.replace("10.1.0.1:7400", "10.1.0.1")).unwrap_err(),
            "lb.toml:2:14: key `controller`: invalid socket address syntax"
        );
    }
}
