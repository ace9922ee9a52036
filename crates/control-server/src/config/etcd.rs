//! The `[etcd]` section of the controller's file.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use coreward_config::toml::de::DeValue;
use coreward_config::{
    BoundedDuration, FromToml, MINUTE_NS, SECOND_NS, Span, Spanned, TomlReader, config_struct, parse_toml_string,
    serde_json,
};
use serde_json::{Value, json};

use super::StoreLocation;

/// Default time for which no controller leads after a leader's failure.
const DEFAULT_LEADER_LEASE_DURATION: Duration = Duration::from_secs(5);

/// Settings of the connection to etcd and of the leader election.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdConfig {
    /// URLs of etcd's members as `http://HOST:PORT` or `https://HOST:PORT`. There is at least one and no duplicate.
    pub endpoints: Vec<String>,
    /// Prefix of all keys in etcd, without a slash at its end.
    pub key_prefix: String,
    /// Time for which this controller continues to lead without an answer from etcd, in whole seconds.
    pub lease_duration: Duration,
    /// Address at which daemons reach this controller.
    pub advertised_address: SocketAddr,
    /// URL of this controller's API for other hosts, as `https://HOST:PORT`, or `None` if the API listens on its own
    /// host only.
    pub advertised_api_url: Option<String>,
    pub tls: Option<EtcdTlsConfig>,
}

/// TLS files for connections to etcd. They are read at the start, and again when they change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdTlsConfig {
    /// File with the trusted authorities for etcd's certificate (PEM).
    pub ca_file: PathBuf,
    /// Files with the controller's own certificate and its key (PEM).
    pub client_certificate_and_key_files: Option<(PathBuf, PathBuf)>,
}

config_struct! {
    /// `[etcd]`: connection to etcd and leader election.
    pub struct EtcdSection {
        /// http://HOST:PORT or https://HOST:PORT of every member of etcd.
        pub endpoints: Vec<Spanned<EtcdEndpoint>>,
        /// Prefix of all keys, unique for the fleet.
        pub prefix: EtcdKeyPrefix = EtcdKeyPrefix("/coreward".to_owned()),
        /// Time for which the leader continues without etcd, and for which no controller leads after the leader's
        /// failure; whole seconds.
        pub lease: Spanned<BoundedDuration<{ 2 * SECOND_NS }, MINUTE_NS>> =
            Spanned::new(0..0, BoundedDuration(DEFAULT_LEADER_LEASE_DURATION)),
        /// This controller's address and port in the daemons' files; default: `listen`.
        pub advertise: Option<SocketAddr>,
        /// https://HOST:PORT of this controller's API, as in its certificate; default: `api`, if it is not local.
        pub advertise_api: Option<ApiUrl>,
        /// Certificates for TLS with etcd.
        pub tls: Option<Spanned<EtcdTlsSection>>,
    }
}

config_struct! {
    /// `[etcd.tls]`: certificates for TLS with etcd.
    pub struct EtcdTlsSection {
        /// File with the trusted authorities of etcd's certificate (PEM).
        pub ca: PathBuf,
        /// File with the controller's own certificate (PEM), if etcd requires one.
        pub certificate: Option<PathBuf>,
        /// File with the key of the certificate (PEM), readable by its owner only.
        pub key: Option<PathBuf>,
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdEndpoint(pub String);

impl FromToml for EtcdEndpoint {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        parse_toml_string(value, reader, |text| {
            let host_and_port = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
            let is_valid = host_and_port.is_some_and(is_host_and_port);
            is_valid
                .then(|| Self(text.to_owned()))
                .ok_or_else(|| format!("{text:?}: expected {}", Self::describe_valid_values()))
        })
    }

    fn describe_valid_values() -> String {
        "a member of etcd, as \"https://10.1.0.5:2379\"".to_owned()
    }

    fn schema() -> Value {
        json!({ "type": "string", "pattern": "^https?://[^/@?# ]+:[0-9]+$" })
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiUrl(pub String);

impl FromToml for ApiUrl {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        parse_toml_string(value, reader, |text| {
            let is_valid = text.strip_prefix("https://").is_some_and(is_host_and_port);
            is_valid
                .then(|| Self(text.to_owned()))
                .ok_or_else(|| format!("{text:?}: expected {}", Self::describe_valid_values()))
        })
    }

    fn describe_valid_values() -> String {
        "where an API is, as \"https://controller1.example:7401\"".to_owned()
    }

    fn schema() -> Value {
        json!({ "type": "string", "pattern": "^https://[^/@?# ]+:[0-9]+$" })
    }
}

fn is_host_and_port(host_and_port: &str) -> bool {
    let is_port = |port: &str| port.parse::<u16>().is_ok_and(|port| port > 0);
    let is_host = |host: &str| !host.is_empty() && !host.contains(['/', '@', '?', '#', ' ']);
    host_and_port.rsplit_once(':').is_some_and(|(host, port)| is_host(host) && is_port(port))
}

/// Prefix of all keys in etcd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdKeyPrefix(pub String);

impl FromToml for EtcdKeyPrefix {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        parse_toml_string(value, reader, |text| {
            let is_unreserved = |segment: &str| !coreward_etcd::RESERVED_KEY_SEGMENTS.contains(&segment);
            let is_valid = text.len() > 1 && text.starts_with('/') && !text.ends_with('/') && !text.contains(' ');
            let is_valid = is_valid && text.split('/').all(is_unreserved);
            is_valid
                .then(|| Self(text.to_owned()))
                .ok_or_else(|| format!("{text:?}: expected {}", Self::describe_valid_values()))
        })
    }

    fn describe_valid_values() -> String {
        let reserved_segments = coreward_etcd::RESERVED_KEY_SEGMENTS.join(", ");
        format!(
            "what all keys in etcd begin with: a slash first, none at the end, and no segment of {reserved_segments}, \
             as \"/coreward\""
        )
    }

    fn schema() -> Value {
        json!({ "type": "string", "pattern": "^/[^ ]*[^/ ]$" })
    }
}

#[derive(Debug, Clone, Copy)]
pub struct ControllerListenAddresses {
    /// Address at which the controller listens for daemons.
    pub daemons: Option<SocketAddr>,
    /// Address at which the controller listens for clients of the API.
    pub api: SocketAddr,
}

/// Returns the store that the file configures, which must be exactly one. `fleet` is the location of the `fleet` key.
pub fn configured_store_location(
    store: Option<PathBuf>,
    etcd: Option<Spanned<EtcdSection>>,
    listens: ControllerListenAddresses,
    fleet: Option<Span>,
    reader: &mut TomlReader<'_>,
) -> Option<StoreLocation> {
    match (store, etcd) {
        (Some(path), None) => Some(StoreLocation::Embedded(path)),
        (None, Some(etcd)) => {
            if let Some(span) = fleet {
                let message = "several controllers may each have another file: expected no `fleet` with [etcd], but \
                               `coreward apply` with the file";
                reader.report_mistake(span, message);
            }
            parse_etcd_config(etcd, listens, reader).map(StoreLocation::Etcd)
        }
        (Some(_), Some(etcd)) => {
            let message =
                "both `store` and [etcd]: expected one of them (`coreward store copy` moves what is on record)";
            reader.report_mistake(etcd.span(), message);
            None
        }
        (None, None) => {
            reader.report_mistake(
                0..0,
                "neither `store` nor [etcd]: expected `store = \"/var/lib/coreward/controller.redb\"`, or [etcd] for \
                 several controllers",
            );
            None
        }
    }
}

fn parse_etcd_config(
    etcd: Spanned<EtcdSection>,
    listen_addresses: ControllerListenAddresses,
    reader: &mut TomlReader<'_>,
) -> Option<EtcdConfig> {
    let etcd_span = etcd.span();
    let EtcdSection { endpoints, prefix, lease, advertise, advertise_api, tls } = etcd.into_inner();
    if endpoints.is_empty() && !reader.has_diagnostics() {
        reader.report_mistake(etcd_span.clone(), "no endpoints: expected at least one member of etcd");
    }
    let checked_endpoints = check_etcd_endpoints(&endpoints, tls.is_some(), reader);
    let BoundedDuration(time) = *lease.get_ref();
    if time.subsec_nanos() != 0 {
        reader.report_mistake(lease.span(), "a lease in parts of a second: expected whole seconds");
    }
    let advertised_address = advertise.or(listen_addresses.daemons);
    if let Some(advertise) = advertised_address.filter(|advertise| advertise.ip().is_unspecified()) {
        let message = format!(
            "others cannot reach {advertise}: expected `advertise`, the address at which daemons reach this controller"
        );
        reader.report_mistake(etcd_span, message);
    }
    let tls = tls.and_then(|tls| check_etcd_tls(tls, reader));
    let advertised_address = advertised_address.filter(|_| !reader.has_diagnostics())?;
    let advertised_api_url =
        advertise_api.map(|ApiUrl(url)| url).or_else(|| advertised_api_url(listen_addresses.api, advertised_address));
    Some(EtcdConfig {
        endpoints: checked_endpoints,
        key_prefix: prefix.0,
        lease_duration: time,
        advertised_address,
        advertised_api_url,
        tls,
    })
}

/// Returns the URLs of etcd's members. Reports duplicates, and URLs whose scheme does not fit `has_tls` (whether TLS is
/// configured).
fn check_etcd_endpoints(
    endpoints: &[Spanned<EtcdEndpoint>],
    has_tls: bool,
    reader: &mut TomlReader<'_>,
) -> Vec<String> {
    let mut checked_endpoints: Vec<String> = Vec::new();
    for endpoint in endpoints {
        let EtcdEndpoint(text) = endpoint.get_ref();
        if checked_endpoints.contains(text) {
            reader.report_mistake(endpoint.span(), format!("{text} is named twice: expected each member once"));
        }
        let is_encrypted = text.starts_with("https://");
        if is_encrypted != has_tls {
            let expected_form =
                if is_encrypted { "[etcd.tls] with `ca`" } else { "https:// where there is [etcd.tls]" };
            reader.report_mistake(endpoint.span(), format!("{text}: expected {expected_form}"));
        }
        checked_endpoints.push(text.clone());
    }
    checked_endpoints
}

fn check_etcd_tls(tls: Spanned<EtcdTlsSection>, reader: &mut TomlReader<'_>) -> Option<EtcdTlsConfig> {
    let tls_span = tls.span();
    let EtcdTlsSection { ca, certificate, key } = tls.into_inner();
    let client_certificate_and_key_files = match (certificate, key) {
        (None, None) => None,
        (Some(certificate), Some(key)) => Some((reader.resolve_path(&certificate), reader.resolve_path(&key))),
        _ => {
            reader.report_mistake(tls_span, "only one of `certificate` and `key`: expected both, or neither");
            return None;
        }
    };
    Some(EtcdTlsConfig { ca_file: reader.resolve_path(&ca), client_certificate_and_key_files })
}

/// Returns the URL at which other hosts reach an API that listens at `api` on the machine with the address `advertise`.
/// Returns `None` if the API is not reachable with TLS from other hosts.
fn advertised_api_url(api: SocketAddr, advertise: SocketAddr) -> Option<String> {
    let ip = if api.ip().is_unspecified() { advertise.ip() } else { api.ip() };
    let is_reachable = !ip.is_loopback() && !ip.is_unspecified() && api.port() > 0;
    is_reachable.then(|| format!("https://{}", SocketAddr::new(ip, api.port())))
}

#[cfg(test)]
mod tests {
    use super::advertised_api_url;

    #[test]
    fn advertised_api_url_is_reachable_by_other_hosts() {
        for (api, advertise, expected) in [
            ("127.0.0.1:7401", "10.1.0.2:7400", None),
            ("10.1.0.1:7401", "10.1.0.2:7400", Some("https://10.1.0.1:7401")),
            ("[fd00::1]:7401", "10.1.0.2:7400", Some("https://[fd00::1]:7401")),
            ("0.0.0.0:7401", "10.1.0.2:7400", Some("https://10.1.0.2:7401")),
            ("0.0.0.0:7401", "127.0.0.1:7400", None),
            ("10.1.0.1:0", "10.1.0.2:7400", None),
        ] {
            let api_url = advertised_api_url(api.parse().unwrap(), advertise.parse().unwrap());
            assert_eq!(api_url.as_deref(), expected, "{api} {advertise}");
        }
    }
}
