//! The side that asks: commands.

use std::fmt;
use std::net::SocketAddr;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use coreward_config::{Secret, read_secret};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::{Method, RequestBuilder, Response};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Problem;
use crate::types::{
    Check, Checked, DrainServer, DrainStatus, Explain, ExplainPackets, Explanation, Explanations, Fleet, FleetApplied,
    Keys, Loads, NewFleet, RotateKeys, Status,
};

/// How long it may take to connect.
const CONNECT_PATIENCE: Duration = Duration::from_secs(5);
/// How long an answer may take: 16,384 servers of 64 cores are about 10 MB.
const PATIENCE: Duration = Duration::from_secs(30);

/// Where a controller's API is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControllerUrl(SocketAddr);

/// What is no place of an API.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?}: expected the address and port of a controller's API, as \"127.0.0.1:7401\"")]
pub struct NoControllerUrl(String);

impl FromStr for ControllerUrl {
    type Err = NoControllerUrl;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bare = text.strip_prefix("http://").unwrap_or(text);
        bare.trim_end_matches('/').parse().map(Self).map_err(|_| NoControllerUrl(text.to_owned()))
    }
}

impl From<SocketAddr> for ControllerUrl {
    fn from(address: SocketAddr) -> Self {
        Self(address)
    }
}

impl fmt::Display for ControllerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

fn drain_path(server: &str) -> String {
    format!("servers/{}/drain", utf8_percent_encode(server, NON_ALPHANUMERIC))
}

/// One controller, and what proves to it who asks.
#[derive(Debug, Clone)]
pub struct Client {
    controller: ControllerUrl,
    token: Secret<String>,
    http: reqwest::Client,
}

impl Client {
    /// # Errors
    /// When the file with the token cannot be read, or others than its owner can read it.
    pub fn new(controller: ControllerUrl, token_file: &Path) -> anyhow::Result<Self> {
        let token = read_secret(token_file).map_err(|problem| {
            anyhow!(
                "{problem} (the controller writes viewer.token and operator.token into its `token_directory`; --token-file or \
                     COREWARD_TOKEN_FILE names one)"
            )
        })?;
        let http = reqwest::Client::builder().no_proxy().connect_timeout(CONNECT_PATIENCE).build()?;
        Ok(Self { controller, token: Secret::new(token), http })
    }

    /// Everything there is to see. `rss_keys`: with whole RSS keys (operators).
    ///
    /// # Errors
    /// As for all of these: when the controller cannot be reached; a [`Problem`] when it says no.
    pub async fn status(&self, rss_keys: bool) -> anyhow::Result<Status> {
        self.get("status", &[("rss_keys", rss_keys)]).await
    }

    /// Where a packet goes, and why.
    pub async fn explain(&self, question: &Explain) -> anyhow::Result<Explanation> {
        self.get("explain", question).await
    }

    /// The same for many packets.
    pub async fn explain_packets(&self, questions: &ExplainPackets) -> anyhow::Result<Explanations> {
        self.send(Method::POST, "explain/packets", questions).await
    }

    /// Which key stamps.
    pub async fn keys(&self) -> anyhow::Result<Keys> {
        self.get("keys", &()).await
    }

    /// Begins a rotation of the cookie keys, or goes on with it.
    pub async fn rotate_keys(&self, rotate: &RotateKeys) -> anyhow::Result<Keys> {
        self.send(Method::POST, "keys/rotate", rotate).await
    }

    /// The fleet's document in force.
    pub async fn fleet(&self) -> anyhow::Result<Fleet> {
        self.get("fleet", &()).await
    }

    /// Puts another one in force, or says what it would change.
    pub async fn put_fleet(&self, fleet: &NewFleet) -> anyhow::Result<FleetApplied> {
        self.send(Method::PUT, "fleet", fleet).await
    }

    /// Whether a document could be the fleet's.
    pub async fn check(&self, check: &Check) -> anyhow::Result<Checked> {
        self.send(Method::POST, "check", check).await
    }

    /// The load of every core of every server, and counts to make rates of.
    pub async fn loads(&self) -> anyhow::Result<Loads> {
        self.get("loads", &()).await
    }

    /// Whether a server is drained, and what remains there.
    pub async fn drain_status(&self, server: &str) -> anyhow::Result<DrainStatus> {
        self.get(&drain_path(server), &()).await
    }

    /// Lets a server take no new connections from now on.
    pub async fn drain(&self, server: &str, drain: &DrainServer) -> anyhow::Result<DrainStatus> {
        self.send(Method::POST, &drain_path(server), drain).await
    }

    /// Ends that.
    pub async fn undrain(&self, server: &str) -> anyhow::Result<DrainStatus> {
        self.ask(self.request(Method::DELETE, &drain_path(server))).await
    }

    async fn get<T: DeserializeOwned>(&self, path: &str, query: &(impl Serialize + ?Sized)) -> anyhow::Result<T> {
        self.ask(self.request(Method::GET, path).query(query)).await
    }

    async fn send<T: DeserializeOwned>(&self, method: Method, path: &str, body: &impl Serialize) -> anyhow::Result<T> {
        self.ask(self.request(method, path).json(body)).await
    }

    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.http.request(method, format!("http://{}/v1/{path}", self.controller.0)).bearer_auth(self.token.expose())
    }

    async fn ask<T: DeserializeOwned>(&self, request: RequestBuilder) -> anyhow::Result<T> {
        let response = request.timeout(PATIENCE).send().await.map_err(|error| self.unreachable(error))?;
        let response = self.accepted(response).await?;
        let body = response.bytes().await.map_err(|error| self.unreachable(error))?;
        serde_json::from_slice(&body)
            .with_context(|| format!("{} answers something else: expected the API of a controller", self.controller))
    }

    async fn accepted(&self, response: Response) -> anyhow::Result<Response> {
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let body = response.bytes().await.map_err(|error| self.unreachable(error))?;
        Err(match serde_json::from_slice::<Problem>(&body) {
            Ok(problem) => problem.into(),
            Err(_) => anyhow!("{} answers {status}: expected the API of a controller", self.controller),
        })
    }

    fn unreachable(&self, error: reqwest::Error) -> anyhow::Error {
        let error = anyhow!(error.without_url());
        let expected = "expected a running `coreward controller` whose `api` that is";
        anyhow!("no controller answers at {} ({}): {expected}", self.controller, error.root_cause())
    }
}
