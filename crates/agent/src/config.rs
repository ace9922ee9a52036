//! The agent's configuration file. Users find its reference in docs/config.md.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use coreward_config::{
    AbsolutePath, InterfaceName, PrintableName, config_enum, config_file, config_struct, string_enum,
};
use coreward_daemon::ControllerAddresses;

config_struct! {
    /// Configuration of the agent. Services, ids and keys come from the controller.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct AgentConfig {
        /// Name of this server in the fleet document.
        pub server: String as PrintableName,
        /// Addresses of the controllers: one address, or a list.
        pub controllers as "controller": ControllerAddresses,
        /// Ethernet device that receives and sends the services' packets.
        pub interface: String as InterfaceName,
        /// Directory for pinned programs and maps in a BPF file system, created if it is missing; one per agent.
        pub pin_directory: PathBuf as AbsolutePath,
        /// Whether the agent sets the fleet's RSS key and a balanced indirection table, or only reads both.
        pub manage_rss: bool = false,
        /// Whether the agent sets net.ipv4.tcp_timestamps=2 for stamped services; if not, the operator must set it.
        pub manage_timestamps: bool = true,
        /// Selection of the worker that gets the connections of a receive queue.
        pub steer: ConnectionSteeringMode = ConnectionSteeringMode::Affinity,
        /// Source of the cores' loads.
        pub load: CoreLoadSourceConfig = CoreLoadSourceConfig::Cpu {},
        /// Source of the RSS key and indirection table.
        pub rss: RssSourceConfig = RssSourceConfig::Ethtool {},
        /// Load balancers whose encapsulated packets are accepted, by address; without it, none are decapsulated.
        pub decapsulate_from: Option<Vec<IpAddr>>,
        /// Address and port at which Prometheus can read metrics; without it, no metrics are served.
        pub metrics: Option<SocketAddr>,
        /// Own certificate and trusted authorities; without it, connections are neither encrypted nor authenticated.
        pub tls: Option<coreward_tls::TlsCredentialFiles>,
        /// Dispatch of requests to the workers of UDP services.
        pub dispatch: Option<coreward_dispatch::config::DispatchConfig>,
    }
}

/// Selection of the worker that gets the connections of a receive queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ConnectionSteeringMode {
    /// Worker that may run on the queue's CPU, and on at most one other CPU.
    #[default]
    Affinity,
    /// Worker with the k-th listening socket for queue k, for emulated cores whose workers are not pinned.
    Order,
    /// Worker that the kernel selects.
    Off,
}

string_enum!(
    ConnectionSteeringMode,
    "steering",
    [
        ("affinity", ConnectionSteeringMode::Affinity),
        ("order", ConnectionSteeringMode::Order),
        ("off", ConnectionSteeringMode::Off)
    ]
    .map(|(name, steer)| (name.to_owned(), steer))
);

config_enum! {
    /// Source of the cores' loads.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum CoreLoadSourceConfig by "source" {
        /// Busy time of the CPU that serves each receive queue.
        Cpu as "cpu" {},
        /// File with the total busy time of each core in ns, as little-endian u64.
        Published as "published" {
            /// Path of the file.
            path: PathBuf,
        },
    }
}

config_enum! {
    /// Source of the RSS key and indirection table.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum RssSourceConfig by "source" {
        /// Settings of the NIC, as the ioctl ETHTOOL_GRSSH returns them.
        Ethtool as "ethtool" {},
        /// Emulated NIC of the testbed.
        Testbed as "testbed" {
            /// Pinned BPF map of `struct emulated_rss`, which has the registers of the emulated NIC.
            path: PathBuf,
            /// Number of entries of the indirection table that the agent sets.
            entries: usize = 128,
        },
    }
}

config_file!(AgentConfig);

#[cfg(test)]
mod tests {
    use coreward_config::TomlSource;

    use super::*;

    const MINIMAL_AGENT_CONFIG_TOML: &str = r#"server = "s1"
controller = "10.1.0.1:7400"
interface = "eth0"
pin_directory = "/sys/fs/bpf/coreward/agent"
"#;

    fn parse_config(text: &str) -> Result<AgentConfig, String> {
        AgentConfig::parse(&TomlSource::from_text("agent.toml", text)).map_err(|mistakes| mistakes.to_string())
    }

    #[test]
    fn minimal_config_file_gets_defaults() {
        let config = parse_config(MINIMAL_AGENT_CONFIG_TOML).unwrap();
        assert_eq!((config.manage_rss, config.manage_timestamps), (false, true));
        assert_eq!(
            (config.steer, config.load, config.rss),
            (ConnectionSteeringMode::Affinity, CoreLoadSourceConfig::Cpu {}, RssSourceConfig::Ethtool {})
        );
        assert_eq!(config.dispatch, None);
    }

    #[test]
    fn every_key_in_the_agent_file_of_testbed_is_parsed() {
        let text = format!(
            "{MINIMAL_AGENT_CONFIG_TOML}manage_rss = true\nmanage_timestamps = false\nsteer = \"order\"\n\
             load = {{ source = \"published\", path = \"/tmp/busy\" }}\nrss = {{ source = \"testbed\", path = \"/r\" \
             }}\n"
        );
        let config = parse_config(&text).unwrap();
        assert_eq!(
            (config.manage_rss, config.manage_timestamps, config.steer),
            (true, false, ConnectionSteeringMode::Order)
        );
        assert_eq!(config.load, CoreLoadSourceConfig::Published { path: "/tmp/busy".into() });
        assert_eq!(config.rss, RssSourceConfig::Testbed { path: "/r".into(), entries: 128 });
    }

    #[test]
    fn dispatch_section_parses_like_a_dispatch_file() {
        let service_toml = "listen = \"0.0.0.0:53\"\npolicy = \"jlq\"\n";
        let dispatch_toml = format!("[[service]]\n{service_toml}[[service.type]]\nprefix = \"get \"\n");
        let dispatch_config =
            coreward_dispatch::config::DispatchConfig::parse(&TomlSource::from_text("dispatch.toml", &dispatch_toml))
                .unwrap();
        let text = format!(
            "{MINIMAL_AGENT_CONFIG_TOML}[[dispatch.service]]\n{service_toml}[[dispatch.service.type]]\n\
             prefix = \"get \"\n"
        );
        assert_eq!(parse_config(&text).unwrap().dispatch, Some(dispatch_config));
        assert_eq!(
            parse_config(&format!(
                "{MINIMAL_AGENT_CONFIG_TOML}[[dispatch.service]]\nlisten = \"0.0.0.0:53\"\nbound = 0\n"
            ))
            .unwrap_err(),
            "agent.toml:7:9: key `dispatch.service.bound`: 0: expected a whole number from 1 to 65535"
        );
        assert_eq!(
            parse_config(&format!(
                "{MINIMAL_AGENT_CONFIG_TOML}[dispatch]\nmetrics = \"127.0.0.1:9440\"\n[[dispatch.service]]\n\
                 {service_toml}"
            ))
            .unwrap_err(),
            "agent.toml:6:11: key `dispatch.metrics`: 127.0.0.1:9440: expected `metrics` outside of this table: the \
             daemon serves all"
        );
        let error_text =
            parse_config(&format!("{MINIMAL_AGENT_CONFIG_TOML}[[dispatch.service]]\nliste = 1\n")).unwrap_err();
        assert_eq!(error_text.lines().count(), 2, "{error_text}");
        assert!(error_text.contains("agent.toml:6:1: key `dispatch.service.liste`: is not known"), "{error_text}");
    }

    #[test]
    fn mistakes_show_line_key_and_expected_value() {
        let cases = [
            (
                "steer = \"oder\"",
                "5:9: key `steer`: steering \"oder\" is not known: expected \"affinity\", \"order\" or \"off\" \
                 (nearest: `order`)",
            ),
            (
                "manage_rs = true",
                "5:1: key `manage_rs`: is not known: expected one of `server`, `controller`, `interface`, \
                 `pin_directory`, `manage_rss`, `manage_timestamps`, `steer`, `load`, `rss`, `decapsulate_from`, \
                 `metrics`, `tls`, `dispatch` (nearest: `manage_rss`)",
            ),
            ("load = { source = \"published\" }", "5:8: key `load.path`: is missing: expected a path in quotes"),
            (
                "load = { source = \"cpu\", path = \"x\" }",
                "5:26: key `load.path`: is not known: expected one of `source`",
            ),
            (
                "rss = { source = \"testbed\", path = \"x\", entries = -1 }",
                "5:51: key `rss.entries`: -1: expected a whole number from 0 on",
            ),
        ];
        for (line, message) in cases {
            assert_eq!(
                parse_config(&format!("{MINIMAL_AGENT_CONFIG_TOML}{line}\n")).unwrap_err(),
                format!("agent.toml:{message}")
            );
        }
    }
}
