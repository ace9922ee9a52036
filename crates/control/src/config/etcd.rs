//! `[etcd]` of the controller's file.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use coreward_config::toml::de::DeValue;
use coreward_config::{Form, MINUTE, Period, Reader, SECOND, Span, Spanned, parsed, serde_json, table};
use serde_json::{Value, json};

use super::StorePlace;

/// How long nobody leads when the leader dies, without a word in the file.
const DEFAULT_LEASE: Duration = Duration::from_secs(5);

/// Where etcd is, and how to lead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdConfig {
    /// `http://HOST:PORT` or `https://HOST:PORT`: at least one, each once.
    pub endpoints: Vec<String>,
    /// What all keys begin with; no slash at its end.
    pub prefix: String,
    /// How long this controller leads without a word from etcd; whole seconds.
    pub lease: Duration,
    /// Where daemons reach this controller.
    pub advertise: SocketAddr,
    /// How to speak TLS with etcd.
    pub tls: Option<EtcdTlsConfig>,
}

/// The files are read when etcd is connected to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdTlsConfig {
    /// Certificates of the authorities that etcd's certificate must come from (PEM).
    pub ca: PathBuf,
    /// Our own certificate and the key to it (PEM).
    pub own: Option<(PathBuf, PathBuf)>,
}

table! {
    /// `[etcd]`.
    pub struct EtcdFile {
        /// http://HOST:PORT or https://HOST:PORT of every member of etcd.
        pub endpoints: Vec<Spanned<Endpoint>>,
        /// What all keys begin with; another one for every fleet.
        pub prefix: Prefix = Prefix("/coreward".to_owned()),
        /// How long the fleet has no leader when the leader dies, and how long the leader goes on without etcd; whole seconds.
        pub lease: Spanned<Period<{ 2 * SECOND }, MINUTE>> = Spanned::new(0..0, Period(DEFAULT_LEASE)),
        /// Address and port at which daemons reach this controller, as in their files; without it what listen says.
        pub advertise: Option<SocketAddr>,
        /// How to speak TLS with etcd.
        pub tls: Option<Spanned<EtcdTlsFile>>,
    }
}

table! {
    /// `[etcd.tls]`.
    pub struct EtcdTlsFile {
        /// File with the certificates of the authorities that etcd's certificate must come from (PEM).
        pub ca: PathBuf,
        /// File with our own certificate (PEM), where etcd wants one.
        pub certificate: Option<PathBuf>,
        /// File with the key to it (PEM), readable by its owner only.
        pub key: Option<PathBuf>,
    }
}

/// Where a member of etcd is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint(pub String);

impl Form for Endpoint {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut Reader<'_>) -> Option<Self> {
        parsed(value, reader, |text| {
            let place = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
            let is_port = |port: &str| port.parse::<u16>().is_ok_and(|port| port > 0);
            let is_host = |host: &str| !host.is_empty() && !host.contains(['/', '@', '?', '#', ' ']);
            match place.and_then(|place| place.rsplit_once(':')) {
                Some((host, port)) if is_host(host) && is_port(port) => Ok(Self(text.to_owned())),
                _ => Err(format!("{text:?}: expected {}", Self::expected())),
            }
        })
    }

    fn expected() -> String {
        "a member of etcd, as \"https://10.1.0.5:2379\"".to_owned()
    }

    fn schema() -> Value {
        json!({ "type": "string", "pattern": "^https?://[^/@?# ]+:[0-9]+$" })
    }
}

/// What keys begin with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prefix(pub String);

impl Form for Prefix {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut Reader<'_>) -> Option<Self> {
        parsed(value, reader, |text| {
            let right = text.len() > 1 && text.starts_with('/') && !text.ends_with('/') && !text.contains(' ');
            right.then(|| Self(text.to_owned())).ok_or_else(|| format!("{text:?}: expected {}", Self::expected()))
        })
    }

    fn expected() -> String {
        "what all keys in etcd begin with: a slash first and none at the end, as \"/coreward\"".to_owned()
    }

    fn schema() -> Value {
        json!({ "type": "string", "pattern": "^/[^ ]*[^/ ]$" })
    }
}

/// Where the file says that everything is; exactly one place. `fleet`: where in the file the fleet's document is named.
pub fn store_place(
    store: Option<PathBuf>,
    etcd: Option<Spanned<EtcdFile>>,
    listen: SocketAddr,
    fleet: Option<Span>,
    reader: &mut Reader<'_>,
) -> Option<StorePlace> {
    match (store, etcd) {
        (Some(path), None) => Some(StorePlace::Embedded(path)),
        (None, Some(etcd)) => {
            if let Some(span) = fleet {
                let message = "several controllers may each have another file: expected no `fleet` with [etcd], but \
                               `coreward apply` with the file";
                reader.mistake(span, message);
            }
            check(etcd, listen, reader).map(StorePlace::Etcd)
        }
        (Some(_), Some(etcd)) => {
            let message =
                "both `store` and [etcd]: expected one of them (`coreward store copy` moves what is on record)";
            reader.mistake(etcd.span(), message);
            None
        }
        (None, None) => {
            reader.mistake(
                0..0,
                "neither `store` nor [etcd]: expected `store = \"/var/lib/coreward/controller.redb\"`, or [etcd] for \
                 several controllers",
            );
            None
        }
    }
}

fn check(etcd: Spanned<EtcdFile>, listen: SocketAddr, reader: &mut Reader<'_>) -> Option<EtcdConfig> {
    let whole = etcd.span();
    let EtcdFile { endpoints, prefix, lease, advertise, tls } = etcd.into_inner();
    if endpoints.is_empty() && !reader.has_found_any() {
        reader.mistake(whole.clone(), "no endpoints: expected at least one member of etcd");
    }
    let mut seen: Vec<String> = Vec::new();
    for endpoint in &endpoints {
        let Endpoint(text) = endpoint.get_ref();
        if seen.contains(text) {
            reader.mistake(endpoint.span(), format!("{text} is named twice: expected each member once"));
        }
        let encrypted = text.starts_with("https://");
        if encrypted != tls.is_some() {
            let expected = if encrypted { "[etcd.tls] with `ca`" } else { "https:// where there is [etcd.tls]" };
            reader.mistake(endpoint.span(), format!("{text}: expected {expected}"));
        }
        seen.push(text.clone());
    }
    let Period(time) = *lease.get_ref();
    if time.subsec_nanos() != 0 {
        reader.mistake(lease.span(), "a lease in parts of a second: expected whole seconds");
    }
    let advertise = advertise.unwrap_or(listen);
    if advertise.ip().is_unspecified() {
        let message = format!(
            "others cannot reach {advertise}: expected `advertise`, the address at which daemons reach this controller"
        );
        reader.mistake(whole, message);
    }
    let tls = tls.and_then(|tls| {
        let span = tls.span();
        let EtcdTlsFile { ca, certificate, key } = tls.into_inner();
        let own = match (certificate, key) {
            (None, None) => None,
            (Some(certificate), Some(key)) => Some((reader.beside(&certificate), reader.beside(&key))),
            _ => {
                reader.mistake(span, "only one of `certificate` and `key`: expected both, or neither");
                return None;
            }
        };
        Some(EtcdTlsConfig { ca: reader.beside(&ca), own })
    });
    let right = !reader.has_found_any();
    right.then_some(EtcdConfig { endpoints: seen, prefix: prefix.0, lease: time, advertise, tls })
}
