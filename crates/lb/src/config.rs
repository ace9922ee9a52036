//! The load balancer's file; docs/config.md is the reference for users.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use coreward_config::{
    AbsolutePath, Diagnostics, HOUR, Interface, MINUTE, Name, Number, Period, SECOND, Source, config_struct,
    string_enum,
};
use coreward_daemon::Controllers;
use coreward_dataplane::lb::{MAX_FLOW_TABLE_ENTRIES, Options};
use coreward_model::connection_table::{TableSize, Timers};

/// Configuration of the daemon. Everything else comes from the controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Name in `coreward status`.
    pub name: String,
    /// Addresses of the controllers.
    pub controllers: Controllers,
    /// Interface of packets for VIPs, in both directions.
    pub interface: String,
    /// Directory of the data plane, in a BPF file system.
    pub pin_directory: PathBuf,
    /// Directory of the last configuration, for a start without controller.
    pub state_directory: PathBuf,
    pub xdp_mode: XdpMode,
    /// Address for other load balancers; without it the interface's first IPv4 address.
    pub address: Option<Ipv4Addr>,
    /// Capacity for connections without a cookie: entries.
    pub flow_table: u32,
    /// Capacity for connections of stateful services.
    pub connection_table: TableSize,
    /// Address of the metrics for Prometheus; `None`: none are served.
    pub metrics: Option<SocketAddr>,
    /// Own identity; `None`: connections are neither encrypted nor authenticated.
    pub tls: Option<coreward_tls::Files>,
    /// Ages at which connections of stateful services are checked.
    pub connection_timers: Timers,
    /// Announcement of VIPs; `None`: by other means.
    pub announce: Option<Announce>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Announce {
    /// The kernel's routing table that a routing daemon learns from.
    pub table: u32,
    /// Treatment of announced VIPs at the daemon's end.
    pub on_stop: OnStop,
    /// Time between their withdrawal and the end.
    pub drain: Duration,
}

/// Treatment of announced VIPs at the daemon's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnStop {
    /// Withdrawn: other load balancers get the packets.
    Withdraw,
    /// Kept, as the data plane: for a restart.
    Keep,
}

config_struct! {
    /// The file.
    pub struct File {
        /// What `coreward status` calls this load balancer; different for every one.
        name: Name,
        /// Where the controller listens; a list where there are several.
        controllers as "controller": Controllers,
        /// The interface that packets for VIPs come in by, and leave by towards the servers.
        interface: Interface,
        /// A directory in a BPF file system, made when missing; one per load balancer.
        pin_directory: AbsolutePath,
        /// A directory on disk for the last configuration: a start without controller goes on by it.
        state_directory: AbsolutePath = AbsolutePath(PathBuf::from("/var/lib/coreward-lb")),
        /// Where in the kernel the program runs: "native" in the driver, "generic" after it, "auto" the first that goes.
        xdp_mode: XdpMode = XdpMode::Auto,
        /// Where other load balancers reach this one; without it the interface's first IPv4 address.
        address: Option<Ipv4Addr>,
        /// Room for connections that carry no cookie: entries.
        flow_table: Number<1, { MAX_FLOW_TABLE_ENTRIES as u64 }> = Number(Options::default().flow_table_entries.into()),
        /// Room for connections of stateful services: entries of 64 bytes.
        connection_table: TableSize = TableSize::default(),
        /// Address and port at which metrics are served for Prometheus; without it nowhere.
        metrics: Option<SocketAddr>,
        /// Who this daemon is, and whom it believes.
        tls: Option<coreward_tls::Files>,
        /// When to ask whether a connection of stateful services still is one.
        connection_timers: Option<ConnectionTimers>,
        /// VIPs that this load balancer can serve are announced to the routers by a routing daemon beside it.
        announce: Option<AnnounceFile>,
    }
}

/// Above the tables that the kernel and distributions name.
const FIRST_TABLE: u64 = 256;

config_struct! {
    /// `[announce]`.
    struct AnnounceFile {
        /// The kernel's routing table that the routing daemon learns VIPs from; no rule may look at it.
        table: Number<FIRST_TABLE, { u32::MAX as u64 }> = Number(7400),
        /// What becomes of VIPs when this daemon is told to end: "withdraw", or "keep", as the data plane goes on.
        on_stop: OnStop = OnStop::Withdraw,
        /// Time between their withdrawal and the end, for routers to hear of it.
        drain: Period<0, MINUTE> = Period(Duration::from_secs(5)),
    }
}

string_enum!(
    OnStop,
    "what becomes of VIPs,",
    [("withdraw", OnStop::Withdraw), ("keep", OnStop::Keep)].map(|(name, what)| (name.to_owned(), what))
);

/// An entry is checked at least once a day, and at most once a second.
type Timer = Period<SECOND, { 24 * HOUR }>;

config_struct! {
    /// Ages at which a server is queried about a connection.
    struct ConnectionTimers {
        /// Since the last packet from the client.
        idle: Option<Timer>,
        /// The same after a FIN or RST.
        closing: Option<Timer>,
    }
}

impl Config {
    fn of(file: File) -> Self {
        let timers = file.connection_timers.map(|timers| (timers.idle, timers.closing)).unwrap_or_default();
        let or = |timer: Option<Timer>, default: Duration| timer.map_or(default, |Period(time)| time);
        let default = Timers::default();
        Self {
            name: file.name.0,
            controllers: file.controllers,
            interface: file.interface.0,
            pin_directory: file.pin_directory.0,
            state_directory: file.state_directory.0,
            xdp_mode: file.xdp_mode,
            address: file.address,
            flow_table: file.flow_table.0 as u32,
            connection_table: file.connection_table,
            metrics: file.metrics,
            tls: file.tls,
            connection_timers: Timers {
                idle: or(timers.0, default.idle),
                closing: or(timers.1, default.closing),
                ..default
            },
            announce: file.announce.map(|announce| Announce {
                table: announce.table.0 as u32,
                on_stop: announce.on_stop,
                drain: announce.drain.0,
            }),
        }
    }
}

/// Where in the kernel the program runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum XdpMode {
    /// In the driver, or not at all.
    Native,
    /// After the driver, slower, with any interface.
    Generic,
    /// Native; where the driver cannot, generic with a warning.
    #[default]
    Auto,
}

string_enum!(
    XdpMode,
    "XDP mode",
    [("native", XdpMode::Native), ("generic", XdpMode::Generic), ("auto", XdpMode::Auto)]
        .map(|(name, mode)| (name.to_owned(), mode))
);

impl Config {
    /// Fails when the file cannot be read; the error lists every mistake.
    pub fn load(path: &Path) -> Result<Self, Diagnostics> {
        Self::parse(&Source::read(path)?)
    }

    /// The error lists every mistake.
    pub fn parse(source: &Source) -> Result<Self, Diagnostics> {
        source.read_as(|file: File, _| Some(Self::of(file)))
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
        Config::parse(&Source::from_text("lb.toml", text)).map_err(|mistakes| mistakes.to_string())
    }

    #[test]
    fn the_mode_is_automatic_unless_said() {
        assert_eq!(parse(GOOD).unwrap().xdp_mode, XdpMode::Auto);
        assert_eq!(parse(&format!("{GOOD}xdp_mode = \"native\"\n")).unwrap().xdp_mode, XdpMode::Native);
    }

    #[test]
    fn tables_and_addresses_have_defaults() {
        let config = parse(GOOD).unwrap();
        assert_eq!((config.address, config.flow_table), (None, 1_048_576));
        assert_eq!(config.connection_table.entries(), 262_144);
        assert_eq!(config.connection_timers, Timers::default());
        let timers = parse(&format!("{GOOD}[connection_timers]\nidle = \"7s\"\n")).unwrap().connection_timers;
        assert_eq!(timers, Timers { idle: Duration::from_secs(7), ..Timers::default() });
        let config = parse(&format!("{GOOD}address = \"10.2.0.1\"\nflow_table = 1000\n")).unwrap();
        assert_eq!((config.address, config.flow_table), (Some(Ipv4Addr::new(10, 2, 0, 1)), 1000));
    }

    #[test]
    fn vips_are_announced_where_that_is_asked_for() {
        assert_eq!(parse(GOOD).unwrap().announce, None);
        let announce = parse(&format!("{GOOD}[announce]\non_stop = \"keep\"\n")).unwrap().announce;
        let expected = Announce { table: 7400, on_stop: OnStop::Keep, drain: Duration::from_secs(5) };
        assert_eq!(announce, Some(expected));
        let mistakes = parse(&format!("{GOOD}[announce]\ntable = 254\n")).unwrap_err();
        assert_eq!(mistakes, "lb.toml:6:9: key `announce.table`: 254: expected a whole number from 256 to 4294967295");
    }

    #[test]
    fn mistakes_name_line_key_and_what_was_expected() {
        let cases = [
            (
                "xdp_mode = \"natif\"",
                "5:12: key `xdp_mode`: XDP mode \"natif\" is not known: expected \"native\", \"generic\" or \"auto\" \
                 (nearest: `native`)",
            ),
            (
                "interfaces = \"eth1\"",
                "5:1: key `interfaces`: is not known: expected one of `name`, `controller`, `interface`, `pin_directory`, \
                 `state_directory`, `xdp_mode`, `address`, `flow_table`, `connection_table`, `metrics`, `tls`, \
                 `connection_timers`, `announce` (nearest: `interface`)",
            ),
            ("flow_table = 0", "5:14: key `flow_table`: 0: expected a whole number from 1 to 16777216"),
            (
                "connection_timers = { closing = \"0s\" }",
                "5:33: key `connection_timers.closing`: \"0s\": expected a time with its unit, from \"1s\" to \"24h\"",
            ),
            (
                "connection_table = 1000",
                "5:20: key `connection_table`: 1000 entries of the connection table: expected a power of two from 1024 to \
                 4194304",
            ),
            ("address = \"10.2.0\"", "5:11: key `address`: \"10.2.0\": expected an IPv4 address, as \"10.2.0.1\""),
        ];
        for (line, message) in cases {
            assert_eq!(parse(&format!("{GOOD}{line}\n")).unwrap_err(), format!("lb.toml:{message}"));
        }
        let mistakes = parse(&GOOD.replace("10.1.0.1:7400", "10.1.0.1").replace("name", "nane")).unwrap_err();
        assert_eq!(mistakes.lines().count(), 3, "{mistakes}");
    }
}
