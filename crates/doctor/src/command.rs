//! The command `coreward doctor`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::Context as _;
use coreward_model::ServiceAddress;
use coreward_model::tuple::TransportProtocol;

use crate::facts::MachineRole;
use crate::finding::FindingSeverity;
use crate::gather::{DoctorOptions, gather_facts};
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
    role: Option<MachineRole>,
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
    #[arg(long, value_enum, default_value_t = DoctorOutputFormat::Text)]
    format: DoctorOutputFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum DoctorOutputFormat {
    /// Text for people
    Text,
    /// One JSON object, for programs
    Json,
}

/// Service on the command line. Its text has the form ADDRESS:PORT, with an optional suffix /tcp or /udp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ServiceArgument(ServiceAddress);

impl FromStr for ServiceArgument {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (socket, protocol) = text.split_once('/').unwrap_or((text, TransportProtocol::Tcp.name()));
        let syntax_error = || format!("{text:?}: expected ADDRESS:PORT, or with /tcp or /udp");
        let socket = socket.parse().with_context(syntax_error)?;
        let protocol = protocol
            .parse::<TransportProtocol>()
            .map_err(|error| anyhow::anyhow!("{error}"))
            .with_context(syntax_error)?;
        Ok(Self(ServiceAddress { vip_and_port: socket, protocol }))
    }
}

/// Runs the checks. Returns the output, and true if no fault remains. Fails if the file or the options are invalid.
pub fn run(args: &DoctorArgs) -> anyhow::Result<(String, bool)> {
    if args.list {
        return Ok((list_checks(args.format), true));
    }
    let options = DoctorOptions {
        config_file: args.config.clone(),
        interface_override: args.interface.clone(),
        role: args.role,
        controller_override: args.controller,
        additional_services: args.services.iter().map(|service| service.0).collect(),
    };
    let mut facts = gather_facts(&options)?;
    let mut findings = checks::run_all_checks(&facts);
    let mut executed_repairs = Vec::new();
    if args.fix {
        executed_repairs = fix::apply_fixes(&findings);
        if !executed_repairs.is_empty() {
            facts = gather_facts(&options)?;
            findings = checks::run_all_checks(&facts);
        }
    }
    let is_free_of_faults = findings.iter().all(|(_, finding)| finding.severity < FindingSeverity::Fault);
    let text = match args.format {
        DoctorOutputFormat::Text => report::format_report(&facts, &findings, &executed_repairs),
        DoctorOutputFormat::Json => format!("{:#}", report::report_to_json(&facts, &findings, &executed_repairs)),
    };
    Ok((text, is_free_of_faults))
}

fn list_checks(format: DoctorOutputFormat) -> String {
    match format {
        DoctorOutputFormat::Text => {
            checks::DOCTOR_CHECKS.iter().map(report::describe_check).collect::<Vec<_>>().join("\n")
        }
        DoctorOutputFormat::Json => {
            format!("{:#}", checks::DOCTOR_CHECKS.iter().map(report::check_to_json).collect::<serde_json::Value>())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doctor_list_has_one_line_per_check() {
        let text = list_checks(DoctorOutputFormat::Text);
        assert_eq!(text.lines().count(), checks::DOCTOR_CHECKS.len());
        let jit_line = text.lines().find(|line| line.starts_with("jit ")).unwrap();
        assert!(jit_line.ends_with("lb, server (--fix): BPF programs are compiled, not interpreted"), "{jit_line}");
        let list_json: serde_json::Value = serde_json::from_str(&list_checks(DoctorOutputFormat::Json)).unwrap();
        assert_eq!(list_json.as_array().unwrap().len(), checks::DOCTOR_CHECKS.len());
        assert_eq!(list_json[0]["roles"][0], "lb");
    }

    #[test]
    fn service_argument_is_parsed_with_and_without_protocol() {
        let parse_service = |text: &str| ServiceArgument::from_str(text).map(|argument| argument.0);
        let expected_address = |protocol| ServiceAddress { vip_and_port: "10.200.0.1:80".parse().unwrap(), protocol };
        assert_eq!(parse_service("10.200.0.1:80").unwrap(), expected_address(TransportProtocol::Tcp));
        assert_eq!(parse_service("10.200.0.1:80/udp").unwrap(), expected_address(TransportProtocol::Udp));
        for invalid_text in ["10.200.0.1", "10.200.0.1:80/sctp", ""] {
            assert!(
                parse_service(invalid_text).unwrap_err().to_string().contains("expected ADDRESS:PORT"),
                "{invalid_text}"
            );
        }
    }
}
