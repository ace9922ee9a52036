//! The rack controller's file; docs/config.md is the reference for users.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use coreward_config::{Diagnostics, MILLISECOND, MINUTE, Name, Number, Period, Source, config_struct};
use coreward_daemon::Controllers;
use coreward_listener::security::ListenerConfig;
use coreward_model::policy::MOST_CANDIDATES;
use coreward_tls::Files;
use coreward_tls::certificate::Fingerprint;

/// Configuration of the daemon. Servers and services come from the controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Name in `coreward status`.
    pub name: String,
    /// Address for agents.
    pub listen: SocketAddr,
    /// Addresses of the controllers.
    pub controllers: Controllers,
    /// Interval at which an agent's whole report is forwarded.
    pub detail_interval: Duration,
    /// Candidates sent per bucket, at most.
    pub candidates: usize,
    /// Address of the metrics; `None`: not served.
    pub metrics: Option<SocketAddr>,
    /// Own certificate; `None`: connections are neither encrypted nor authenticated.
    pub tls: Option<Files>,
    /// Rejected certificates, such as those of lost keys.
    pub revoked_certificates: Vec<Fingerprint>,
    /// Suppresses the warning about missing TLS.
    pub allow_plaintext: bool,
}

/// At most a minute, as `coreward status` shows these reports.
type Detail = Period<{ 100 * MILLISECOND }, MINUTE>;

config_struct! {
    /// The file.
    pub struct File {
        /// What `coreward status` calls this rack; different for every one.
        name: Name,
        /// Address and port at which agents find it: what their files call `controller`.
        listen: SocketAddr,
        /// Where the controller listens; a list where there are several.
        controllers as "controller": Controllers,
        /// How often each agent's whole report is handed on to the controller, for `coreward status` and metrics.
        detail_interval: Detail = Period(Duration::from_secs(1)),
        /// How many of its least loaded cores are passed up for each bucket at most; fewer than 8 cost crossrss-plus
        /// something.
        candidates: Number<1, { MOST_CANDIDATES as u64 }> = Number(MOST_CANDIDATES.into()),
        /// Address and port at which metrics are served for Prometheus; without it nowhere.
        metrics: Option<SocketAddr>,
        /// Who this rack is, and whom it believes.
        tls: Option<Files>,
        /// Certificates that are refused though they are right, as their keys were lost.
        revoked_certificates: Vec<Fingerprint>,
        /// Without `[tls]`: that connections from beyond this host are plain is wanted, and not warned of at every start.
        allow_plaintext: bool = false,
    }
}

impl Config {
    /// Reads and parses the file.
    pub fn load(path: &Path) -> Result<Self, Diagnostics> {
        Self::parse(&Source::read(path)?)
    }

    /// Parses the file, or returns all mistakes.
    pub fn parse(source: &Source) -> Result<Self, Diagnostics> {
        source.read_as(|file: File, _| {
            Some(Self {
                name: file.name.0,
                listen: file.listen,
                controllers: file.controllers,
                detail_interval: file.detail_interval.0,
                candidates: file.candidates.0 as usize,
                metrics: file.metrics,
                tls: file.tls,
                revoked_certificates: file.revoked_certificates,
                allow_plaintext: file.allow_plaintext,
            })
        })
    }

    /// Returns the settings of the listening socket.
    pub fn listener_config(&self) -> ListenerConfig<'_> {
        let Self { listen, tls, revoked_certificates, allow_plaintext, .. } = self;
        ListenerConfig { listen: *listen, tls: tls.as_ref(), revoked_certificates, allow_plaintext: *allow_plaintext }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_keys_have_defaults_and_invalid_ones_are_named() {
        let parse = |more: &str| {
            let text = format!("name = \"r1\"\nlisten = \"10.3.0.1:7400\"\ncontroller = \"10.1.0.1:7400\"\n{more}");
            Config::parse(&Source::from_text("rack.toml", &text))
        };
        let config = parse("").unwrap();
        assert_eq!((config.detail_interval, config.candidates), (Duration::from_secs(1), 8));
        assert_eq!(parse("candidates = 2\ndetail_interval = \"5s\"\n").unwrap().candidates, 2);
        let wrong = parse("candidates = 9\ndetail_interval = \"1ms\"\n").unwrap_err().to_string();
        assert!(wrong.contains("rack.toml:4") && wrong.contains("rack.toml:5"), "{wrong}");
    }
}
