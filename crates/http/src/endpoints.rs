//! Builder of the API's endpoints. Each endpoint that is added with a required role gets authentication, limits, a
//! timeout, and an entry in the OpenAPI document.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderValue, Uri, header};
use axum::middleware::{Next, from_fn_with_state, map_response};
use axum::response::{IntoResponse as _, Response};
use coreward_tls::certificate::CertificateFingerprint;
use coreward_tls::verify::RevocationList;
use parking_lot::Mutex;
use tokio::sync::watch;
use utoipa::OpenApi as _;
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{ContentBuilder, OpenApi, Ref, RefOr, Response as DescribedResponse, ResponseBuilder};
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter};

use crate::limits::ApiRateLimits;
use crate::problem::PROBLEM_JSON_MEDIA_TYPE;
use crate::serve::ConnectionPeer;
use crate::sessions::BrowserSessions;
use crate::tokens::ApiTokens;
use crate::{Problem, ProblemKind};
use coreward_api::{Caller, Role};

/// Default limit of a request body's size, in bytes.
pub const DEFAULT_MAX_REQUEST_BODY_BYTES: usize = 64 << 10;
/// Maximum size of a request that contains a fleet document, in bytes. 16,384 servers and 1,000 services take 2 MB.
pub const MAX_FLEET_DOCUMENT_BYTES: usize = 8 << 20;
/// Time limit for a request's handler to begin its answer.
const API_ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Name of the bearer token scheme in the OpenAPI document.
const TOKEN_SECURITY_SCHEME: &str = "token";

/// Numbers of answered requests, by the HTTP status code of the answer.
#[derive(Debug, Default)]
pub struct RequestCountsByStatus(Mutex<BTreeMap<u16, u64>>);

impl RequestCountsByStatus {
    fn count_response_status(&self, status: u16) {
        *self.0.lock().entry(status).or_default() += 1;
    }

    /// Returns the number of answered requests for each HTTP status code.
    pub fn request_counts_by_status(&self) -> BTreeMap<u16, u64> {
        self.0.lock().clone()
    }
}

/// Access control of the API. It authenticates callers and enforces roles and rate limits.
pub struct ApiAccessControl {
    tokens: Arc<ApiTokens>,
    sessions: BrowserSessions,
    revocation_list: RevocationList,
    rate_limits: ApiRateLimits,
    request_counts: Arc<RequestCountsByStatus>,
    /// Counter of credential reloads. Streaming answers end when it changes.
    permission_change_sender: watch::Sender<u64>,
}

impl ApiAccessControl {
    /// Creates an access control that accepts callers with one of these tokens or with a certificate that is not
    /// revoked.
    pub fn new(
        tokens: Arc<ApiTokens>,
        revocation_list: RevocationList,
        request_counts: Arc<RequestCountsByStatus>,
    ) -> Self {
        let (sessions, rate_limits) = (BrowserSessions::default(), ApiRateLimits::default());
        Self {
            tokens,
            sessions,
            revocation_list,
            rate_limits,
            request_counts,
            permission_change_sender: watch::Sender::new(0),
        }
    }

    /// Reads the token files again. If a token has changed, sessions that began with a token end. Sessions that began
    /// with a certificate always end, because it may have been revoked. Streaming answers also end
    /// ([`ApiAccessControl::subscribe_to_permission_changes`]), and callers with valid credentials reconnect. Fails and
    /// keeps the previous tokens if a token file is unusable.
    pub fn reload_tokens(&self) -> anyhow::Result<()> {
        let reload_result = self.tokens.reload();
        self.sessions.end_certificate_sessions();
        if reload_result.as_ref().is_ok_and(|has_changed| *has_changed) {
            self.sessions.end_token_sessions();
        }
        self.permission_change_sender.send_modify(|count| *count += 1);
        reload_result.map(drop)
    }

    /// Returns a receiver that is notified when permissions may have changed. Streaming answers then end.
    pub fn subscribe_to_permission_changes(&self) -> watch::Receiver<u64> {
        self.permission_change_sender.subscribe()
    }

    /// Returns the sessions of browsers.
    pub fn sessions(&self) -> &BrowserSessions {
        &self.sessions
    }

    /// Returns the caller that the request's token, certificate or session identifies. Fails if none of them is valid.
    fn authenticate_request(&self, request: &Request) -> Result<Caller, Problem> {
        let peer = request.extensions().get::<ConnectionPeer>().cloned().unwrap_or_default();
        let authenticate_session = || {
            self.sessions
                .has_valid_session(request.headers(), &self.revocation_list)
                .then(|| (Role::Viewer, "session".into()))
        };
        let role_and_principal = match (request.headers().get(header::AUTHORIZATION), &peer.certificate) {
            (Some(authorization), _) => self.authenticate_bearer_token(authorization),
            (None, Some(certificate)) => Some((certificate.role, certificate.name.clone())),
            (None, None) => authenticate_session(),
        };
        match role_and_principal {
            Some((role, principal)) => Ok(Caller { role, address: peer.address, principal }),
            None => {
                self.rate_limits.check_rejected_request_rate(peer.address)?;
                let expected_credentials = "expected `Authorization: Bearer TOKEN` with the token of a role \
                                (viewer.token or operator.token in the controller's folder), or by TLS the \
                                certificate of an operator or a viewer";
                Err(Problem::new(ProblemKind::Unauthenticated, format!("no valid token: {expected_credentials}")))
            }
        }
    }

    /// Returns the role that the token in the `Authorization` header grants, and a caller name that contains the
    /// token's id.
    fn authenticate_bearer_token(&self, authorization: &HeaderValue) -> Option<(Role, Arc<str>)> {
        let (scheme, token) = authorization.to_str().ok()?.split_once(' ')?;
        // The scheme's case does not matter (RFC 9110, Sect. 11.1).
        let token = Some(token.trim()).filter(|_| scheme.eq_ignore_ascii_case("bearer"))?;
        let role = self.tokens.role_of_token(token)?;
        Some((role, format!("{role} token {}", token_id(token)).into()))
    }
}

/// Returns the first 8 hexadecimal digits of a token's SHA-256, which identify the token without revealing it.
pub fn token_id(token: &str) -> String {
    CertificateFingerprint::sha256(token.as_bytes()).to_string().replace(':', "")[..8].to_ascii_lowercase()
}

/// State of the middleware that authorizes a request before the handler of an endpoint runs.
#[derive(Clone)]
struct RouteAuthorizer {
    access_control: Arc<ApiAccessControl>,
    required_role: Role,
}

async fn authorize_request(State(route_guard): State<RouteAuthorizer>, request: Request, next: Next) -> Response {
    let response = authorize_and_run_handler(&route_guard, request, next).await;
    route_guard.access_control.request_counts.count_response_status(response.status().as_u16());
    response
}

async fn authorize_and_run_handler(route_guard: &RouteAuthorizer, mut request: Request, next: Next) -> Response {
    let caller_result = route_guard.access_control.authenticate_request(&request).and_then(|caller| {
        route_guard.access_control.rate_limits.check_request_rate(
            caller.role,
            caller.address,
            route_guard.required_role == Role::Operator,
        )?;
        if caller.role < route_guard.required_role {
            let detail = format!(
                "the token or certificate is that of a {}: expected that of an {}",
                caller.role, route_guard.required_role
            );
            return Err(Problem::new(ProblemKind::Forbidden, detail));
        }
        Ok(caller)
    });
    match caller_result {
        Err(problem) => problem.into_response(),
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            let response = tokio::time::timeout(API_ANSWER_TIMEOUT, next.run(request)).await;
            response.unwrap_or_else(|_| {
                let detail = format!("no answer within {} s", API_ANSWER_TIMEOUT.as_secs());
                Problem::new(ProblemKind::Timeout, detail).into_response()
            })
        }
    }
}

/// Builder of the API's router and OpenAPI document, to which endpoints are added.
pub struct ApiEndpoints<S> {
    access_control: Arc<ApiAccessControl>,
    router: OpenApiRouter<S>,
}

#[derive(utoipa::OpenApi)]
#[openapi(components(schemas(Problem)))]
struct BaseOpenApiDocument;

impl<S: Clone + Send + Sync + 'static> ApiEndpoints<S> {
    /// Creates a builder without endpoints. `title` and `description` are for the OpenAPI document.
    pub fn new(access_control: Arc<ApiAccessControl>, title: &str, description: &str) -> Self {
        let mut document = BaseOpenApiDocument::openapi();
        document.info.title = title.to_owned();
        document.info.description = Some(description.to_owned());
        document.info.version = env!("CARGO_PKG_VERSION").to_owned();
        let token_scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some(
            "The token of a role: the files viewer.token and operator.token (`token_directory` of the controller)",
        ));
        let components = document.components.get_or_insert_default();
        components.add_security_scheme(TOKEN_SECURITY_SCHEME, SecurityScheme::Http(token_scheme.build()));
        Self { access_control, router: OpenApiRouter::with_openapi(document) }
    }

    /// Adds an endpoint (`routes!(handler)`) for callers that have at least `required_role`.
    pub fn add_endpoint(self, required_role: Role, routes: UtoipaMethodRouter<S>) -> Self {
        self.add_endpoint_with_body_limit(required_role, DEFAULT_MAX_REQUEST_BODY_BYTES, routes)
    }

    /// Adds an endpoint as [`ApiEndpoints::add_endpoint`] does, but limits the request body to `max_body_bytes`.
    pub fn add_endpoint_with_body_limit(
        mut self,
        required_role: Role,
        max_body_bytes: usize,
        routes: UtoipaMethodRouter<S>,
    ) -> Self {
        let (schemas, mut paths, router) = routes;
        paths
            .paths
            .values_mut()
            .flat_map(path_item_operations)
            .for_each(|operation| document_role_and_errors(operation, required_role));
        let route_guard = RouteAuthorizer { access_control: self.access_control.clone(), required_role };
        let router = router
            .layer(DefaultBodyLimit::max(max_body_bytes))
            .route_layer(from_fn_with_state(route_guard, authorize_request));
        self.router = self.router.routes((schemas, paths, router));
        self
    }

    /// Returns the router and the OpenAPI document.
    pub fn into_parts(self) -> (Router<S>, OpenApi) {
        let (router, document) = self.router.split_for_parts();
        let router = router
            .fallback(async |uri: Uri| Problem::not_found("path", uri.path()))
            .method_not_allowed_fallback(async || {
                Problem::new(ProblemKind::MethodNotAllowed, "expected one of the methods in `Allow`")
            })
            .layer(map_response(add_common_headers));
        (router, document)
    }
}

/// Adds headers that forbid the client to cache the answer or to guess its content type.
async fn add_common_headers(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

fn path_item_operations(path_item: &mut PathItem) -> impl Iterator<Item = &mut Operation> {
    [&mut path_item.get, &mut path_item.put, &mut path_item.post, &mut path_item.delete, &mut path_item.patch]
        .into_iter()
        .flatten()
}

/// Documents the required role, and the errors that every operation can return, in an OpenAPI operation.
fn document_role_and_errors(operation: &mut Operation, required_role: Role) {
    // OpenAPI 3.1, Security Requirement Object. The array may name the required roles of a scheme without scopes.
    operation.security = Some(vec![SecurityRequirement::new(TOKEN_SECURITY_SCHEME, [required_role.name()])]);
    let mut errors = vec![
        ("400", "The request is malformed"),
        ("401", "No valid token or certificate"),
        ("403", "The role does not permit this request"),
        ("408", "The request took too long"),
        ("429", "Too many requests"),
        ("500", "The controller failed"),
        ("503", "Another controller leads"),
        ("507", "The change cannot be stored, and is not made"),
    ];
    if operation.request_body.is_some() {
        errors.extend([("413", "The body is too large"), ("415", "The body is not JSON")]);
    }
    let responses = &mut operation.responses.responses;
    for (status, description) in errors {
        responses.entry(status.to_owned()).or_insert_with(|| describe_problem_response(description));
    }
}

/// Returns the OpenAPI description of an error response, whose body is a [`Problem`].
fn describe_problem_response(description: &str) -> RefOr<DescribedResponse> {
    let content = ContentBuilder::new().schema(Some(Ref::from_schema_name("Problem"))).build();
    RefOr::T(ResponseBuilder::new().description(description).content(PROBLEM_JSON_MEDIA_TYPE, content).build())
}
