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

/// Options of `coreward doctor`.
#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// Configuration file of the daemon, which sets role, interface and controller (docs/config.md)
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Network device that receives the services' packets
    #[arg(long, value_name = "NAME")]
    interface: Option<String>,
    /// Role of the machine
    #[arg(long, value_enum)]
    role: Option<Role>,
    /// Address of the controller: `listen` in its configuration file
    #[arg(long, value_name = "ADDRESS:PORT")]
    controller: Option<SocketAddr>,
    /// Service of this machine that the controller does not list; may be repeated
    #[arg(long = "service", value_name = "ADDRESS:PORT[/tcp|/udp]")]
    services: Vec<ServiceArgument>,
    /// Apply the safe remedies, then check again
    #[arg(long)]
    fix: bool,
    /// List every check with its roles and expectation, without checking anything
    #[arg(long, conflicts_with_all = ["config", "fix"])]
    list: bool,
    /// Format of the output
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// Text for people
    Text,
    /// One JSON object, for programs
    Json,
}

/// Service on the command line: ADDRESS:PORT, optionally with /tcp or /udp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ServiceArgument(ServiceAddress);

impl FromStr for ServiceArgument {
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

/// Runs the checks. Returns the output, and whether no fault is left. Fails when the file or the options are wrong.
pub fn run(args: &DoctorArgs) -> anyhow::Result<(String, bool)> {
    if args.list {
        return Ok((list(args.format), true));
    }
    let options = CliOptions {
        config: args.config.clone(),
        interface: args.interface.clone(),
        role: args.role,
        controller: args.controller,
        services: args.services.iter().map(|service| service.0).collect(),
    };
    let mut facts = gather(&options)?;
    let mut findings = checks::run(&facts);
    let mut done = Vec::new();
    if args.fix {
        done = fix::apply(&findings);
        if !done.is_empty() {
            facts = gather(&options)?;
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

/// Returns the list of all checks in the given format.
fn list(format: Format) -> String {
    match format {
        Format::Text => checks::CHECKS.iter().map(report::check_line).collect::<Vec<_>>().join("\n"),
        Format::Json => format!("{:#}", checks::CHECKS.iter().map(report::check_json).collect::<serde_json::Value>()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_has_one_line_per_check() {
        let text = list(Format::Text);
        assert_eq!(text.lines().count(), checks::CHECKS.len());
        let jit = text.lines().find(|line| line.starts_with("jit ")).unwrap();
        assert!(jit.ends_with("lb, server (--fix): BPF programs are compiled, not interpreted"), "{jit}");
        let json: serde_json::Value = serde_json::from_str(&list(Format::Json)).unwrap();
        assert_eq!(json.as_array().unwrap().len(), checks::CHECKS.len());
        assert_eq!(json[0]["roles"][0], "lb");
    }

    #[test]
    fn services_are_named_by_address_port_and_protocol() {
        let service = |text: &str| ServiceArgument::from_str(text).map(|argument| argument.0);
        let expected = |protocol| ServiceAddress { socket: "10.200.0.1:80".parse().unwrap(), protocol };
        assert_eq!(service("10.200.0.1:80").unwrap(), expected(Protocol::Tcp));
        assert_eq!(service("10.200.0.1:80/udp").unwrap(), expected(Protocol::Udp));
        for wrong in ["10.200.0.1", "10.200.0.1:80/sctp", ""] {
            assert!(service(wrong).unwrap_err().to_string().contains("expected ADDRESS:PORT"), "{wrong}");
        }
    }
}
