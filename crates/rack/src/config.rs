//! The rack controller's configuration file. Users find its reference in docs/config.md.

use std::net::SocketAddr;
use std::time::Duration;

use coreward_config::{
    BoundedDuration, BoundedInteger, MILLISECOND_NS, MINUTE_NS, PrintableName, config_file, config_struct,
};
use coreward_daemon::ControllerAddresses;
use coreward_listener::security::ListenerConfig;
use coreward_model::policy::MAX_CANDIDATES;
use coreward_tls::TlsCredentialFiles;
use coreward_tls::certificate::CertificateFingerprint;

/// Interval between an agent's complete reports, at most a minute so that `coreward status` is not too old.
type DetailedReportInterval = BoundedDuration<{ 100 * MILLISECOND_NS }, MINUTE_NS>;

config_struct! {
    /// Configuration of the rack controller. Servers and services come from the controller.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct RackControllerConfig {
        /// Name of the rack in `coreward status`; different for every rack.
        pub name: String as PrintableName,
        /// Address and port at which agents connect; `controller` in the agents' files names it.
        pub listen: SocketAddr,
        /// Addresses of the controllers: one, or a list.
        pub controllers as "controller": ControllerAddresses,
        /// Interval at which each agent's complete report is forwarded, for `coreward status` and metrics.
        pub detail_interval: Duration as DetailedReportInterval = BoundedDuration(Duration::from_secs(1)),
        /// Maximum number of candidates (least loaded cores) that are sent per bucket; fewer than 8 make crossrss-plus
        /// less accurate.
        pub candidates: usize as BoundedInteger<1, { MAX_CANDIDATES as u64 }> = BoundedInteger(MAX_CANDIDATES.into()),
        /// Address and port of the metrics for Prometheus; without it none are served.
        pub metrics: Option<SocketAddr>,
        /// Own certificate, and the trusted ones; without it connections are neither encrypted nor authenticated.
        pub tls: Option<TlsCredentialFiles>,
        /// Certificates that are rejected although they are valid, such as those of lost keys.
        pub revoked_certificates: Vec<CertificateFingerprint>,
        /// Suppresses the warning that connections from other hosts are not encrypted without `[tls]`.
        pub allow_plaintext: bool = false,
    }
}

config_file!(RackControllerConfig);

impl RackControllerConfig {
    /// Returns the settings of the listening socket.
    pub fn listener_config(&self) -> ListenerConfig<'_> {
        let Self { listen, tls, revoked_certificates, allow_plaintext, .. } = self;
        ListenerConfig {
            listen_address: *listen,
            tls: tls.as_ref(),
            revoked_certificates,
            allow_plaintext: *allow_plaintext,
        }
    }
}

#[cfg(test)]
mod tests {
    use coreward_config::TomlSource;

    use super::*;

    #[test]
    fn missing_keys_have_defaults_and_invalid_ones_are_named() {
        let parse_with_lines = |extra_lines: &str| {
            let text =
                format!("name = \"r1\"\nlisten = \"10.3.0.1:7400\"\ncontroller = \"10.1.0.1:7400\"\n{extra_lines}");
            RackControllerConfig::parse(&TomlSource::from_text("rack.toml", &text))
        };
        let default_config = parse_with_lines("").unwrap();
        assert_eq!((default_config.detail_interval, default_config.candidates), (Duration::from_secs(1), 8));
        assert_eq!(parse_with_lines("candidates = 2\ndetail_interval = \"5s\"\n").unwrap().candidates, 2);
        let error_text = parse_with_lines("candidates = 9\ndetail_interval = \"1ms\"\n").unwrap_err().to_string();
        assert!(error_text.contains("rack.toml:4") && error_text.contains("rack.toml:5"), "{error_text}");
    }
}
