//! Keys of the controller's file, and the valid values of each key.

use std::net::SocketAddr;
use std::path::PathBuf;

use coreward_config::{LocatedValue, Secret, Spanned, config_struct};
use coreward_model::rss::RssKey;
use coreward_tls::certificate::CertificateFingerprint;

use super::DEFAULT_API_ADDRESS;
use super::etcd::EtcdSection;

const MOVE_TO_FLEET_FILE_HINT: &str = "it in the fleet's own file, which `fleet = \"fleet.toml\"` names here";

config_struct! {
    /// The controller's file.
    pub struct ControllerFile {
        /// Address and port for agents and load balancers.
        pub listen: LocatedValue<SocketAddr>,
        /// Address and port for commands, the dashboard and other programs (HTTP). Beyond this host the API requires
        /// `[tls]` and uses HTTPS.
        pub api: Spanned<SocketAddr> = Spanned::new(0..0, DEFAULT_API_ADDRESS),
        /// Directory of the API's tokens; default: the directory of `store`, or with [etcd] /var/lib/coreward.
        pub token_directory: Option<PathBuf>,
        /// File for persistent state: server ids, cookie keys, the fleet's RSS key. Created if missing. Required
        /// without [etcd].
        pub store: Option<PathBuf>,
        /// Connection to etcd, instead of `store`, for several controllers, one of which leads.
        pub etcd: Option<Spanned<EtcdSection>>,
        /// Address and port of the metrics for Prometheus; by default no metrics are served.
        pub metrics: Option<SocketAddr>,
        /// The fleet's file, relative to this file's directory; by default `coreward apply` sets the document.
        pub fleet: Option<Spanned<PathBuf>>,
        /// File with the RSS key that agents with manage_rss = true set; by default a random key, drawn once and
        /// stored.
        pub rss_key_file: Option<Secret<RssKey>>,
        /// This controller's certificate, and its trusted authorities.
        pub tls: Option<coreward_tls::TlsCredentialFiles>,
        /// Certificates that are rejected although they are valid, because their keys were lost.
        pub revoked_certificates: Vec<CertificateFingerprint>,
        /// Without `[tls]`: accept plain connections from other hosts without a warning at every start.
        pub allow_plaintext: bool = false,
    }
    elsewhere {
        "rss_key" => "`rss_key_file = \"FILE\"`, with the key in FILE, as it is a secret",
        "report_interval_ms" => MOVE_TO_FLEET_FILE_HINT,
        "report_interval" => MOVE_TO_FLEET_FILE_HINT,
        "load_ewma_alpha" => MOVE_TO_FLEET_FILE_HINT,
        "buckets" => MOVE_TO_FLEET_FILE_HINT,
        "retire_after_s" => MOVE_TO_FLEET_FILE_HINT,
        "max_connection_lifetime" => MOVE_TO_FLEET_FILE_HINT,
        "key_rotation_hours" => MOVE_TO_FLEET_FILE_HINT,
        "key_rotation" => MOVE_TO_FLEET_FILE_HINT,
        "server" => MOVE_TO_FLEET_FILE_HINT,
        "service" => MOVE_TO_FLEET_FILE_HINT,
    }
}
