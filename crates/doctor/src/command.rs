//! `coreward doctor`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::Context as _;
use coreward_model::ServiceAddress;
use coreward_model::tuple::Protocol;

use crate::facts::Role;
use crate::finding::Severity;
use crate::gather::{CliOptions, gather};
use crate::{checks, fix, report};

/// Options.
#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// The daemon's file (docs/config.md); it says the role, the interface, the controller
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The device of the services' packets
    #[arg(long, value_name = "NAME")]
    interface: Option<String>,
    /// What the machine is for
    #[arg(long, value_enum)]
    role: Option<Role>,
    /// Where the controller listens
    #[arg(long, value_name = "ADDRESS:PORT")]
    controller: Option<SocketAddr>,
    /// A service of this machine that the controller does not name; may be repeated
    #[arg(long = "service", value_name = "ADDRESS:PORT[/tcp|/udp]")]
    services: Vec<NamedService>,
    /// Do what is safe, then look again
    #[arg(long)]
    fix: bool,
    /// What to print
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// For people
    Text,
    /// One object, for programs
    Json,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct NamedService(ServiceAddress);

impl FromStr for NamedService {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (socket, protocol) = text.split_once('/').unwrap_or((text, Protocol::Tcp.name()));
        let expected = || format!("{text:?}: expected ADDRESS:PORT, or with /tcp or /udp");
        let socket = socket.parse().with_context(expected)?;
        let protocol =
            protocol.parse::<Protocol>().map_err(|error| anyhow::anyhow!("{error}")).with_context(expected)?;
        Ok(Self(ServiceAddress { socket, protocol }))
    }
}

/// What is to be printed, and whether no fault is left. Fails when the file or the options are wrong.
pub fn run(args: &DoctorArgs) -> anyhow::Result<(String, bool)> {
    let told = CliOptions {
        config: args.config.clone(),
        interface: args.interface.clone(),
        role: args.role,
        controller: args.controller,
        services: args.services.iter().map(|service| service.0).collect(),
    };
    let mut facts = gather(&told)?;
    let mut findings = checks::run(&facts);
    let mut done = Vec::new();
    if args.fix {
        done = fix::apply(&findings);
        if !done.is_empty() {
            facts = gather(&told)?;
            findings = checks::run(&facts);
        }
    }
    let fit = findings.iter().all(|(_, finding)| finding.severity < Severity::Fault);
    let text = match args.format {
        Format::Text => report::text(&facts, &findings, &done),
        Format::Json => format!("{:#}", report::json(&facts, &findings, &done)),
    };
    Ok((text, fit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_are_named_by_address_port_and_protocol() {
        let service = |text: &str| NamedService::from_str(text).map(|named| named.0);
        let expected = |protocol| ServiceAddress { socket: "10.200.0.1:80".parse().unwrap(), protocol };
        assert_eq!(service("10.200.0.1:80").unwrap(), expected(Protocol::Tcp));
        assert_eq!(service("10.200.0.1:80/udp").unwrap(), expected(Protocol::Udp));
        for wrong in ["10.200.0.1", "10.200.0.1:80/sctp", ""] {
            assert!(service(wrong).unwrap_err().to_string().contains("expected ADDRESS:PORT"), "{wrong}");
        }
    }
}
