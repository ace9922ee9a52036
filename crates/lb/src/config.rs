//! The load balancer's configuration file. Users find its reference in docs/config.md.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use coreward_config::{
    AbsolutePath, BoundedDuration, BoundedInteger, HOUR_NS, InterfaceName, MINUTE_NS, PrintableName, SECOND_NS,
    config_file, config_struct, string_enum,
};
use coreward_daemon::ControllerAddresses;
use coreward_dataplane::lb::{LoadBalancerOptions, MAX_FLOW_TABLE_ENTRIES, XdpMode};
use coreward_model::connection_table::{ConnectionTableSize, ConnectionTimeouts};
use coreward_model::vlan::Vlan;

/// Treatment of announced VIPs when the daemon stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VipTreatmentOnStop {
    /// VIPs are withdrawn, so that other load balancers get the packets.
    Withdraw,
    /// VIPs stay announced, because the data plane continues. This is meant for a restart.
    Keep,
}

config_struct! {
    /// Configuration of the load balancer. Everything else comes from the controller.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct LoadBalancerConfig {
        /// Name in `coreward status`; different for every load balancer.
        pub name: String as PrintableName,
        /// Addresses of the controllers: one, or a list.
        pub controllers as "controller": ControllerAddresses,
        /// Interface that receives and sends packets for VIPs.
        pub interface: String as InterfaceName,
        /// VLAN of packets for VIPs; without it they are untagged.
        pub vlan: Option<Vlan>,
        /// Directory for pinned programs and maps in a BPF file system, created if missing; one per load balancer.
        pub pin_directory: PathBuf as AbsolutePath,
        /// Directory for the last configuration, which is used if no controller is reachable at the start.
        pub state_directory: PathBuf as AbsolutePath = AbsolutePath(PathBuf::from("/var/lib/coreward-lb")),
        /// XDP mode: "native" (in the driver), "generic" (after the driver), or "auto" (native if possible).
        pub xdp_mode: XdpMode as XdpModeName = XdpModeName(XdpMode::default()),
        /// Address that other load balancers use; default: the interface's first IPv4 address, or else an IPv6 address.
        pub address: Option<IpAddr>,
        /// Number of entries in the flow table, for connections without a cookie.
        pub flow_table: u32 as BoundedInteger<1, { MAX_FLOW_TABLE_ENTRIES as u64 }> =
            BoundedInteger(LoadBalancerOptions::default().flow_table_entry_count.into()),
        /// Number of entries for connections of stateful services; each takes 64 bytes.
        pub connection_table: ConnectionTableSize = ConnectionTableSize::default(),
        /// Address and port of the metrics for Prometheus; without it none are served.
        pub metrics: Option<SocketAddr>,
        /// Own certificate, and the trusted ones; without it connections are neither encrypted nor authenticated.
        pub tls: Option<coreward_tls::TlsCredentialFiles>,
        /// Times without packets after which a server is queried about a connection of a stateful service.
        pub connection_timers: ConnectionTimeouts as ConfiguredConnectionTimers =
            ConfiguredConnectionTimers { idle: None, closing: None },
        /// Announcement of VIPs by a routing daemon, once they can be served; without it the operator routes them.
        pub announce: Option<VipAnnouncementConfig>,
    }
}

/// Smallest id of a routing table to which neither the kernel nor distributions give a name.
const FIRST_UNNAMED_ROUTE_TABLE: u64 = 256;

config_struct! {
    /// The `[announce]` section.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct VipAnnouncementConfig {
        /// The kernel's routing table that the routing daemon learns VIPs from; no rule may use it.
        pub table: u32 as BoundedInteger<FIRST_UNNAMED_ROUTE_TABLE, { u32::MAX as u64 }> = BoundedInteger(7400),
        /// Treatment of announced VIPs when the daemon stops: "withdraw", or "keep", because the data plane continues.
        pub on_stop: VipTreatmentOnStop = VipTreatmentOnStop::Withdraw,
        /// Time between the withdrawal of VIPs and the daemon's end, so that routers learn of the withdrawal.
        pub drain: Duration as BoundedDuration<0, MINUTE_NS> = BoundedDuration(Duration::from_secs(5)),
    }
}

string_enum!(
    VipTreatmentOnStop,
    "what becomes of VIPs,",
    [("withdraw", VipTreatmentOnStop::Withdraw), ("keep", VipTreatmentOnStop::Keep)]
        .map(|(name, on_stop)| (name.to_owned(), on_stop))
);

/// Timeout of 1 s to 24 h without packets, after which a server is queried about the connection.
type BoundedConnectionTimer = BoundedDuration<SECOND_NS, { 24 * HOUR_NS }>;

config_struct! {
    /// Times without packets after which a server is queried about a connection.
    struct ConfiguredConnectionTimers {
        /// Time since the last packet from the client.
        idle: Option<BoundedConnectionTimer>,
        /// Time since the last packet from the client, after a FIN or RST.
        closing: Option<BoundedConnectionTimer>,
    }
}

impl From<ConfiguredConnectionTimers> for ConnectionTimeouts {
    fn from(configured_timers: ConfiguredConnectionTimers) -> Self {
        let timeout_or_default = |timer: Option<BoundedConnectionTimer>, default| timer.map_or(default, Duration::from);
        let default_timeouts = ConnectionTimeouts::default();
        let (idle, closing) = (
            timeout_or_default(configured_timers.idle, default_timeouts.idle),
            timeout_or_default(configured_timers.closing, default_timeouts.closing),
        );
        ConnectionTimeouts { idle, closing, ..default_timeouts }
    }
}

struct XdpModeName(XdpMode);

string_enum!(
    XdpModeName,
    "XDP mode",
    [("native", XdpMode::Native), ("generic", XdpMode::Generic), ("auto", XdpMode::Auto)]
        .map(|(name, mode)| (name.to_owned(), XdpModeName(mode)))
);

impl From<XdpModeName> for XdpMode {
    fn from(name: XdpModeName) -> Self {
        name.0
    }
}

config_file!(LoadBalancerConfig);

#[cfg(test)]
mod tests {
    use coreward_config::TomlSource;

    use super::*;

    const MINIMAL_LB_CONFIG_TOML: &str = r#"name = "lb1"
controller = "10.1.0.1:7400"
interface = "eth0"
pin_directory = "/sys/fs/bpf/coreward/lb1"
"#;

    fn parse_config(text: &str) -> Result<LoadBalancerConfig, String> {
        LoadBalancerConfig::parse(&TomlSource::from_text("lb.toml", text)).map_err(|mistakes| mistakes.to_string())
    }

    #[test]
    fn xdp_mode_defaults_to_auto() {
        assert_eq!(parse_config(MINIMAL_LB_CONFIG_TOML).unwrap().xdp_mode, XdpMode::Auto);
        assert_eq!(
            parse_config(&format!("{MINIMAL_LB_CONFIG_TOML}xdp_mode = \"native\"\n")).unwrap().xdp_mode,
            XdpMode::Native
        );
    }

    #[test]
    fn tables_and_addresses_have_defaults() {
        let config = parse_config(MINIMAL_LB_CONFIG_TOML).unwrap();
        assert_eq!((config.address, config.flow_table), (None, 1_048_576));
        assert_eq!(config.connection_table.entry_count(), 262_144);
        assert_eq!(config.connection_timers, ConnectionTimeouts::default());
        let idle_timeouts = parse_config(&format!("{MINIMAL_LB_CONFIG_TOML}[connection_timers]\nidle = \"7s\"\n"))
            .unwrap()
            .connection_timers;
        assert_eq!(idle_timeouts, ConnectionTimeouts { idle: Duration::from_secs(7), ..ConnectionTimeouts::default() });
        assert_eq!(config.vlan, None);
        assert_eq!(parse_config(&format!("{MINIMAL_LB_CONFIG_TOML}vlan = 20\n")).unwrap().vlan, Vlan::new(20).ok());
        let config =
            parse_config(&format!("{MINIMAL_LB_CONFIG_TOML}address = \"10.2.0.1\"\nflow_table = 1000\n")).unwrap();
        assert_eq!((config.address, config.flow_table), (Some(IpAddr::from([10, 2, 0, 1])), 1000));
    }

    #[test]
    fn announce_section_enables_vip_announcement() {
        assert_eq!(parse_config(MINIMAL_LB_CONFIG_TOML).unwrap().announce, None);
        let announce_config =
            parse_config(&format!("{MINIMAL_LB_CONFIG_TOML}[announce]\non_stop = \"keep\"\n")).unwrap().announce;
        let expected_announce =
            VipAnnouncementConfig { table: 7400, on_stop: VipTreatmentOnStop::Keep, drain: Duration::from_secs(5) };
        assert_eq!(announce_config, Some(expected_announce));
        let mistakes = parse_config(&format!("{MINIMAL_LB_CONFIG_TOML}[announce]\ntable = 254\n")).unwrap_err();
        assert_eq!(mistakes, "lb.toml:6:9: key `announce.table`: 254: expected a whole number from 256 to 4294967295");
    }

    #[test]
    fn config_errors_name_line_key_and_expected_value() {
        let cases = [
            (
                "xdp_mode = \"natif\"",
                "5:12: key `xdp_mode`: XDP mode \"natif\" is not known: expected \"native\", \"generic\" or \"auto\" \
                 (nearest: `native`)",
            ),
            (
                "interfaces = \"eth1\"",
                "5:1: key `interfaces`: is not known: expected one of `name`, `controller`, `interface`, `vlan`, \
                 `pin_directory`, `state_directory`, `xdp_mode`, `address`, `flow_table`, `connection_table`, \
                 `metrics`, `tls`, `connection_timers`, `announce` (nearest: `interface`)",
            ),
            ("flow_table = 0", "5:14: key `flow_table`: 0: expected a whole number from 1 to 16777216"),
            (
                "connection_timers = { closing = \"0s\" }",
                "5:33: key `connection_timers.closing`: \"0s\": expected a time with its unit, from \"1s\" to \"24h\"",
            ),
            (
                "connection_table = 1000",
                "5:20: key `connection_table`: 1000 entries of the connection table: expected a power of two from 1024 \
                 to 4194304",
            ),
            ("vlan = 4095", "5:8: key `vlan`: VLAN 4095: expected 1 to 4094"),
            (
                "address = \"10.2.0\"",
                "5:11: key `address`: \"10.2.0\": expected an address, as \"10.2.0.1\" or \"2001:db8::1\"",
            ),
        ];
        for (line, message) in cases {
            assert_eq!(
                parse_config(&format!("{MINIMAL_LB_CONFIG_TOML}{line}\n")).unwrap_err(),
                format!("lb.toml:{message}")
            );
        }
        let mistakes =
            parse_config(&MINIMAL_LB_CONFIG_TOML.replace("10.1.0.1:7400", "10.1.0.1").replace("name", "nane"))
                .unwrap_err();
        assert_eq!(mistakes.lines().count(), 3, "{mistakes}");
    }
}
