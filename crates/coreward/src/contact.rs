//! Which controller a command asks, and with whose certificate.

use std::net::SocketAddr;
use std::path::PathBuf;

use coreward_control::show::Contact;
use coreward_tls::Files;

#[derive(clap::Args, Clone)]
pub struct ContactArgs {
    /// Where the controller listens
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:7400")]
    controller: SocketAddr,
    /// Of a controller with `[tls]`: the authorities' certificates
    #[arg(long, value_name = "FILE", requires = "certificate", requires = "key")]
    ca: Option<PathBuf>,
    /// The certificate of an operator or a viewer (`coreward certs issue --role viewer`)
    #[arg(long, value_name = "FILE", requires = "ca")]
    certificate: Option<PathBuf>,
    /// The key to it
    #[arg(long, value_name = "FILE", requires = "ca")]
    key: Option<PathBuf>,
}

impl From<&ContactArgs> for Contact {
    fn from(args: &ContactArgs) -> Self {
        let files = |((ca, certificate), key)| Files { ca, certificate, key };
        let tls = args.ca.clone().zip(args.certificate.clone()).zip(args.key.clone()).map(files);
        Self { address: args.controller, tls }
    }
}
