//! Client of the controllers' HTTP API, which the commands use.

mod contact;
mod request_exchange;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, anyhow, ensure};
use coreward_config::Secret;
use coreward_tls::connect::HttpsConnector;
use coreward_tls::failure::{ConnectionFailureReason, PeerConnectionFailure};
use coreward_tls::verify::ExpectedControllerHost;
use hyper::Method;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::task::JoinSet;

use crate::Problem;
use crate::tokens::read_token;
pub use contact::{ApiCredential, ControllerUrl, InvalidControllerUrl};
use coreward_api::types::{
    Acknowledgements, Audit, AuditQuery, CheckRequest, CheckResult, DrainServer, DrainStatus, Explain, Explanation,
    Fleet, FleetApplied, Health, HealthState, Keys, LoadBalancers, Loads, NewFleet, RotateKeys, Status,
};
use request_exchange::{PendingRequest, connect_and_send_request};

/// Time limit for each controller to answer whether it is the leader, if several controllers are configured.
const LEADER_PROBE_TIMEOUT: Duration = Duration::from_secs(5);

fn drain_path(server: &str) -> String {
    format!("servers/{}/drain", utf8_percent_encode(server, NON_ALPHANUMERIC))
}

/// Client of a fleet's controllers. It sends each request to the leader, with the caller's credential.
#[derive(Debug, Clone)]
pub struct ControllerClient {
    controllers: Vec<ControllerUrl>,
    token: Option<Secret<String>>,
    https_connector: Option<HttpsConnector>,
}

impl ControllerClient {
    /// Creates a client of a single controller on this host. Fails if the token's file cannot be read, or if users
    /// other than its owner can read it.
    pub fn new(controller: ControllerUrl, token_file: &Path) -> anyhow::Result<Self> {
        let credential = ApiCredential::Token { file: token_file.to_owned(), ca: None };
        Self::with_controllers(vec![controller], &credential, ExpectedControllerHost::Requested)
    }

    /// Creates a client of all controllers of a fleet. With `https://`, each controller's certificate must be valid for
    /// `host`. Fails if a file cannot be read, if users other than a secret's owner can read it, or if `https://` is
    /// used without a `ca`.
    pub fn with_controllers(
        controllers: Vec<ControllerUrl>,
        credential: &ApiCredential,
        host: ExpectedControllerHost,
    ) -> anyhow::Result<Self> {
        let (token, https) = match credential {
            ApiCredential::Token { file, ca } => {
                let connector_without_certificate = |ca| HttpsConnector::without_certificate(ca, host);
                (Some(read_api_token(file)?), ca.as_deref().map(connector_without_certificate).transpose()?)
            }
            ApiCredential::Certificate(files) => (None, Some(HttpsConnector::with_certificate(files, host)?)),
        };
        for controller in &controllers {
            let has_credential = if controller.is_https() { https.is_some() } else { token.is_some() };
            let expected_credential = if controller.is_https() {
                "https:// and no `--ca`: expected the file with the fleet's authorities"
            } else {
                "a certificate proves nothing without TLS: expected https://HOST:PORT, or a token"
            };
            ensure!(has_credential, "{controller}: {expected_credential}");
        }
        ensure!(!controllers.is_empty(), "no controller: expected at least one");
        Ok(Self { controllers, token, https_connector: https })
    }

    /// Returns the health of the controller that answers. If another controller leads, this includes the leader's
    /// address.
    pub async fn health(&self) -> anyhow::Result<Health> {
        self.get_json("health", &()).await
    }

    /// Returns the status of the whole fleet, with complete RSS keys on request (operators only). Like every request,
    /// fails if no leader can be reached, or with a [`Problem`] if the leader rejects it.
    pub async fn status(&self, include_rss_keys: bool) -> anyhow::Result<Status> {
        self.get_json("status", &[("rss_keys", include_rss_keys)]).await
    }

    /// Returns an explanation of how a load balancer selects the destination of a packet.
    pub async fn explain_packet(&self, request: &Explain) -> anyhow::Result<Explanation> {
        self.get_json("explain", request).await
    }

    /// Returns the state of the keys that authenticate cookies.
    pub async fn cookie_keys(&self) -> anyhow::Result<Keys> {
        self.get_json("keys", &()).await
    }

    /// Begins a rotation of the keys that authenticate cookies, or continues the current one.
    pub async fn rotate_keys(&self, request: &RotateKeys) -> anyhow::Result<Keys> {
        self.send_json(Method::POST, "keys/rotate", request).await
    }

    /// Returns the fleet document that is currently applied.
    pub async fn fleet(&self) -> anyhow::Result<Fleet> {
        self.get_json("fleet", &()).await
    }

    /// Applies another fleet document. If `dry_run` is set, only returns the changes that it would cause.
    pub async fn apply_fleet(&self, fleet: &NewFleet) -> anyhow::Result<FleetApplied> {
        self.send_json(Method::PUT, "fleet", fleet).await
    }

    /// Returns which daemons have accepted or rejected the newest configuration, and which have not answered.
    pub async fn configuration_acknowledgements(&self) -> anyhow::Result<Acknowledgements> {
        self.get_json("fleet/acknowledgements", &()).await
    }

    /// Returns the newest entries of the audit log.
    pub async fn audit_log(&self, query: &AuditQuery) -> anyhow::Result<Audit> {
        self.get_json("audit", query).await
    }

    /// Removes a permanently absent load balancer from the controller's records. Returns the remaining load balancers.
    pub async fn forget_load_balancer(&self, name: &str) -> anyhow::Result<LoadBalancers> {
        let path = format!("load-balancers/{}", utf8_percent_encode(name, NON_ALPHANUMERIC));
        self.send_request_to_leader(PendingRequest { method: Method::DELETE, path_and_query: path, json_body: None })
            .await
    }

    /// Checks a fleet document without applying it, and returns its mistakes.
    pub async fn check_fleet_document(&self, check_fleet_document: &CheckRequest) -> anyhow::Result<CheckResult> {
        self.send_json(Method::POST, "check", check_fleet_document).await
    }

    /// Returns the load of every core of every server, and the counters of every load balancer.
    pub async fn loads(&self) -> anyhow::Result<Loads> {
        self.get_json("loads", &()).await
    }

    /// Returns the state of a server's drain and the number of its remaining connections.
    pub async fn drain_status(&self, server: &str) -> anyhow::Result<DrainStatus> {
        self.get_json(&drain_path(server), &()).await
    }

    /// Drains a server in some or all of its services.
    pub async fn drain_server(&self, server: &str, request: &DrainServer) -> anyhow::Result<DrainStatus> {
        self.send_json(Method::POST, &drain_path(server), request).await
    }

    /// Ends the drain of a server, so that it receives new connections again.
    pub async fn undrain_server(&self, server: &str) -> anyhow::Result<DrainStatus> {
        self.send_request_to_leader(PendingRequest {
            method: Method::DELETE,
            path_and_query: drain_path(server),
            json_body: None,
        })
        .await
    }

    async fn get_json<T: DeserializeOwned>(&self, path: &str, query: &(impl Serialize + ?Sized)) -> anyhow::Result<T> {
        let query = serde_urlencoded::to_string(query).context("a request that cannot be written")?;
        let path = if query.is_empty() { path.to_owned() } else { format!("{path}?{query}") };
        self.send_request_to_leader(PendingRequest { method: Method::GET, path_and_query: path, json_body: None }).await
    }

    async fn send_json<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
    ) -> anyhow::Result<T> {
        let body = serde_json::to_vec(body).context("a request that cannot be written")?;
        self.send_request_to_leader(PendingRequest { method, path_and_query: path.to_owned(), json_body: Some(body) })
            .await
    }

    async fn send_request_to_leader<T: DeserializeOwned>(&self, request: PendingRequest) -> anyhow::Result<T> {
        let controller = match &self.controllers[..] {
            [only] => only,
            _ => self.find_leader().await?,
        };
        self.send_request_to_controller(controller, request).await
    }

    /// Returns the leading controller. Queries all controllers concurrently, because one of them may hang. A change is
    /// sent only to the leader, so that it is not made twice.
    async fn find_leader(&self) -> anyhow::Result<&ControllerUrl> {
        let mut leader_probes = JoinSet::new();
        for (position, controller) in self.controllers.iter().enumerate() {
            let (client, controller) = (self.clone(), controller.clone());
            leader_probes.spawn(async move {
                let request =
                    PendingRequest { method: Method::GET, path_and_query: "health".to_owned(), json_body: None };
                let health = tokio::time::timeout(
                    LEADER_PROBE_TIMEOUT,
                    client.send_request_to_controller::<Health>(&controller, request),
                )
                .await;
                let timeout_error = || anyhow!("no answer within {} s", LEADER_PROBE_TIMEOUT.as_secs());
                (position, health.unwrap_or_else(|_| Err(timeout_error())))
            });
        }
        let mut probe_outcomes_by_index = BTreeMap::new();
        while let Some(probe_outcome) = leader_probes.join_next().await {
            match probe_outcome? {
                (position, Ok(Health { state: HealthState::Ready | HealthState::Settling, .. })) => {
                    return Ok(&self.controllers[position]);
                }
                (position, Ok(Health { leader: Some(leader), leader_api, .. })) => {
                    let leader_api_text = leader_api.map_or_else(String::new, |api| format!(" (API: {api})"));
                    probe_outcomes_by_index.insert(position, format!("{leader}{leader_api_text} leads"))
                }
                (position, Ok(_)) => probe_outcomes_by_index.insert(position, "no controller leads".to_owned()),
                (position, Err(error)) => probe_outcomes_by_index.insert(position, format!("{error:#}")),
            };
        }
        let outcome_texts: Vec<String> = probe_outcomes_by_index
            .into_iter()
            .map(|(position, outcome)| format!("{}: {outcome}", self.controllers[position]))
            .collect();
        Err(anyhow!(
            "none of these controllers leads ({}): expected `--controller` with all of them",
            outcome_texts.join("; ")
        ))
    }

    async fn send_request_to_controller<T: DeserializeOwned>(
        &self,
        controller: &ControllerUrl,
        request: PendingRequest,
    ) -> anyhow::Result<T> {
        let https = self.https_connector.as_ref().filter(|_| controller.is_https());
        let token_text = self.token.as_ref().map(|token| token.expose().as_str());
        let unreachable_error = |error: anyhow::Error| {
            let expected = match find_tls_failure(&error) {
                Some(failure) if failure.reason == ConnectionFailureReason::WrongName => {
                    "expected the host that its certificate names, or `--controller-name` with its name"
                }
                _ => "expected a running `coreward controller` with this `api`",
            };
            anyhow!("no controller answers at {controller} ({}): {expected}", error.root_cause())
        };
        let (status, body) =
            connect_and_send_request(controller, https, token_text, request).await.map_err(unreachable_error)?;
        let unexpected_answer_message = || format!("{controller} answers {status}: expected the API of a controller");
        if status.is_success() {
            return serde_json::from_slice(&body).with_context(unexpected_answer_message);
        }
        Err(serde_json::from_slice::<Problem>(&body)
            .map_or_else(|_| anyhow!(unexpected_answer_message()), anyhow::Error::from))
    }
}

/// Returns the TLS failure that caused the error, or `None` if another failure caused it.
fn find_tls_failure(error: &anyhow::Error) -> Option<&PeerConnectionFailure> {
    error.root_cause().downcast_ref::<io::Error>()?.get_ref()?.downcast_ref()
}

fn read_api_token(file: &Path) -> anyhow::Result<Secret<String>> {
    read_token(file).map_err(|problem| {
        anyhow!(
            "{problem} (the controller writes viewer.token and operator.token into its `token_directory`; --token-file \
             or COREWARD_TOKEN_FILE names one)"
        )
    })
}
