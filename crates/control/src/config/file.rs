//! The file as serde sees it: names of keys, and what one value must be.

use std::fmt::Display;
use std::net::{IpAddr, SocketAddr, SocketAddrV4};
use std::path::PathBuf;
use std::time::Duration;

use coreward_config::Spanned;
use coreward_model::ServerId;
use coreward_model::consistency::{Consistency, Timestamps};
use coreward_model::load::Alpha;
use coreward_model::placement::BucketCount;
use coreward_model::policy::{Capacity, Weight};
use coreward_model::rss::RssKey;
use coreward_model::tuple::{Protocol, ServiceAddress};
use serde::de::{Deserialize, Deserializer, Error as _};

use super::ServerState;

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    pub listen: SocketAddr,
    pub store: PathBuf,
    pub report_interval_ms: Option<Interval>,
    pub alpha: Option<Parsed<Alpha>>,
    pub buckets: Option<Parsed<BucketCount>>,
    pub rss_key: Option<Parsed<RssKey>>,
    pub retire_after_s: Option<u32>,
    pub key_rotation_hours: Option<Spanned<RotationInterval>>,
    #[serde(default, rename = "server")]
    pub servers: Vec<Spanned<Server>>,
    #[serde(default, rename = "service")]
    pub services: Vec<Spanned<Service>>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Server {
    pub name: Spanned<Name>,
    pub address: Spanned<Parsed<ServerAddress>>,
    pub id: Option<Spanned<Parsed<ServerId>>>,
    pub state: Option<ServerState>,
    pub weight: Option<Parsed<Weight>>,
    pub capacity: Option<Parsed<Capacity>>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Service {
    pub name: Spanned<Name>,
    pub vip: Spanned<Parsed<Vip>>,
    pub protocol: Option<Parsed<Protocol>>,
    pub consistency: Option<Spanned<Parsed<Consistency>>>,
    pub timestamps: Option<Spanned<Parsed<Timestamps>>>,
    pub udp: Option<Spanned<UdpMode>>,
    pub policy: Option<Spanned<Parsed<PolicyName>>>,
    pub slow_start_s: Option<SlowStart>,
    pub buckets: Option<Parsed<BucketCount>>,
    pub servers: Option<Vec<Spanned<String>>>,
}

/// A value that is parsed from a simpler one of the file.
pub struct Parsed<T>(pub T);

/// How `T` is written in the file.
pub trait Written: Sized {
    type As: for<'de> Deserialize<'de>;
    fn parse(written: Self::As) -> Result<Self, impl Display>;
}

impl<'de, T: Written> Deserialize<'de> for Parsed<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        T::parse(T::As::deserialize(deserializer)?).map(Parsed).map_err(D::Error::custom)
    }
}

impl Written for Alpha {
    type As = f64;
    fn parse(written: f64) -> Result<Self, impl Display> {
        Alpha::new(written)
    }
}

impl Written for BucketCount {
    type As = u64;
    fn parse(written: u64) -> Result<Self, impl Display> {
        BucketCount::new(written)
    }
}

impl Written for ServerId {
    type As = u64;
    fn parse(written: u64) -> Result<Self, impl Display> {
        ServerId::try_from(written)
    }
}

impl Written for RssKey {
    type As = String;
    fn parse(written: String) -> Result<Self, impl Display> {
        written.parse::<RssKey>()
    }
}

impl Written for Protocol {
    type As = String;
    fn parse(written: String) -> Result<Self, impl Display> {
        written.parse::<Protocol>()
    }
}

impl Written for Consistency {
    type As = String;
    fn parse(written: String) -> Result<Self, impl Display> {
        written.parse::<Consistency>()
    }
}

impl Written for Timestamps {
    type As = String;
    fn parse(written: String) -> Result<Self, impl Display> {
        written.parse::<Timestamps>()
    }
}

impl Written for Weight {
    type As = u64;
    fn parse(written: u64) -> Result<Self, impl Display> {
        Weight::new(written)
    }
}

impl Written for Capacity {
    type As = f64;
    fn parse(written: f64) -> Result<Self, impl Display> {
        Capacity::new(written)
    }
}

/// What one decision of a UDP service is for.
#[derive(Clone, Copy, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UdpMode {
    /// All datagrams of one client's address and port.
    Flow,
    /// One datagram.
    Packet,
}

/// The name of a policy that exists.
#[derive(Clone, Copy)]
pub struct PolicyName(pub &'static str);

impl Written for PolicyName {
    type As = String;
    fn parse(written: String) -> Result<Self, impl Display> {
        let known = coreward_model::policy::names().into_iter().find(|name| *name == written);
        known.map(PolicyName).ok_or(coreward_model::policy::UnknownPolicy(written))
    }
}

/// VIP and port of a service.
#[derive(Clone, Copy)]
pub struct Vip(pub SocketAddrV4);

impl Vip {
    pub fn with(self, protocol: Protocol) -> ServiceAddress {
        ServiceAddress { socket: self.0.into(), protocol }
    }
}

impl Written for Vip {
    type As = String;
    fn parse(written: String) -> Result<Self, impl Display> {
        let expected = "expected an IPv4 address that one host can have and a port from 1 on, as \"10.200.0.1:80\"";
        let vip = written.parse::<SocketAddrV4>().ok().filter(|vip| is_host(*vip.ip()) && vip.port() != 0);
        vip.map(Vip).ok_or_else(|| format!("VIP {written:?}: {expected}"))
    }
}

/// Where a server is reached.
#[derive(Clone, Copy)]
pub struct ServerAddress(pub IpAddr);

impl Written for ServerAddress {
    type As = String;
    fn parse(written: String) -> Result<Self, impl Display> {
        let expected = "expected an IPv4 address that one host can have, as \"10.2.0.11\"";
        let address = written.parse::<std::net::Ipv4Addr>().ok().filter(|address| is_host(*address));
        address.map(|v4| ServerAddress(v4.into())).ok_or_else(|| format!("server address {written:?}: {expected}"))
    }
}

fn is_host(address: std::net::Ipv4Addr) -> bool {
    !(address.is_unspecified() || address.is_broadcast() || address.is_multicast())
}

/// A name: not empty, no blanks or control characters, so that logs and tables stay readable.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Name(pub String);

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let written = String::deserialize(deserializer)?;
        let readable = written.chars().all(|c| !c.is_whitespace() && !c.is_control());
        if written.is_empty() || !readable || written.len() > 64 {
            return Err(D::Error::custom(format!("name {written:?}: expected 1 to 64 bytes without blanks")));
        }
        Ok(Self(written))
    }
}

/// At most an hour: who needs longer drains and weighs by hand.
pub struct SlowStart(pub Duration);

impl<'de> Deserialize<'de> for SlowStart {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let seconds = u64::deserialize(deserializer)?;
        if seconds > 3600 {
            return Err(D::Error::custom(format!("a slow start of {seconds} s: expected 0 (none) to 3600")));
        }
        Ok(Self(Duration::from_secs(seconds)))
    }
}

/// An hour to a year.
#[derive(Clone, Copy)]
pub struct RotationInterval(pub Duration);

impl<'de> Deserialize<'de> for RotationInterval {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let hours = u64::deserialize(deserializer)?;
        if !(1..=8760).contains(&hours) {
            return Err(D::Error::custom(format!("a key rotation every {hours} h: expected 1 to 8760 (a year)")));
        }
        Ok(Self(Duration::from_secs(hours * 3600)))
    }
}

/// 1 to 100 Hz.
pub struct Interval(pub Duration);

impl<'de> Deserialize<'de> for Interval {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let milliseconds = u64::deserialize(deserializer)?;
        if !(10..=1000).contains(&milliseconds) {
            return Err(D::Error::custom(format!("a report interval of {milliseconds} ms: expected 10 to 1000")));
        }
        Ok(Self(Duration::from_millis(milliseconds)))
    }
}
