//! Which controllers a command asks, and what proves to them who asks.

use std::path::PathBuf;

use coreward_api::client::{Client, ControllerUrl, Proof};
use coreward_control::config::DEFAULT_API;
use coreward_tls::Files;

/// Where a controller keeps the operator's token in packages.
const DEFAULT_TOKEN_FILE: &str = "/var/lib/coreward/operator.token";

#[derive(clap::Args, Clone)]
pub struct ContactArgs {
    /// Where the controller's API is: ADDRESS:PORT on this host, or https://HOST:PORT; of several controllers all,
    /// with commas between: the one that leads answers
    #[arg(
        long,
        value_name = "ADDRESS:PORT",
        env = "COREWARD_CONTROLLER",
        value_delimiter = ',',
        default_values_t = [ControllerUrl::from(DEFAULT_API)]
    )]
    controller: Vec<ControllerUrl>,
    /// The token of an operator or a viewer, which the controller writes into its `token_directory`
    #[arg(long, value_name = "FILE", env = "COREWARD_TOKEN_FILE", default_value = DEFAULT_TOKEN_FILE)]
    token_file: PathBuf,
    /// For https://: the authorities' certificates
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// In place of a token: the certificate of an operator or a viewer (`coreward certs issue --role viewer`)
    #[arg(long, value_name = "FILE", requires = "ca", requires = "key")]
    certificate: Option<PathBuf>,
    /// The key to it
    #[arg(long, value_name = "FILE", requires = "certificate")]
    key: Option<PathBuf>,
}

impl ContactArgs {
    /// What asks them.
    ///
    /// # Errors
    /// When a file cannot be read, or does not do.
    pub fn client(&self) -> anyhow::Result<Client> {
        let files = |((ca, certificate), key)| Files { ca, certificate, key };
        let certificate = self.ca.clone().zip(self.certificate.clone()).zip(self.key.clone()).map(files);
        let token = || Proof::Token { file: self.token_file.clone(), ca: self.ca.clone() };
        Client::of_several(self.controller.clone(), &certificate.map_or_else(token, Proof::Certificate))
    }
}
