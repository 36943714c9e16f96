-- SPDX-License-Identifier: Apache-2.0
-- load.lua - requests for wrk, good and bad in turn; bench/serve/load.py runs it. The document's id comes from AKV_DOCUMENT.
local document = os.getenv("AKV_DOCUMENT") or "doc-000000000000000000000000"
local json = {["Content-Type"] = "application/json"}
local key = {["Content-Type"] = "application/json", ["Authorization"] = "Bearer nonsense"}
local function chat(more)
   return '{"messages":[{"role":"user","content":"Name a colour."}],"max_tokens":4' .. (more or "") .. "}"
end
local requests = {
   {"GET", "/health"}, {"GET", "/metrics"}, {"GET", "/"}, {"GET", "/v1/models"}, {"GET", "/v1/documents"},
   {"POST", "/v1/chat/completions", json, chat()},
   {"POST", "/v1/chat/completions", json, chat(',"stream":true,"logprobs":true,"top_logprobs":3')},
   {"POST", "/v1/chat/completions", json, chat(',"document":"' .. document .. '"')},
   {"POST", "/v1/completions", json, '{"prompt":"Once","max_tokens":3,"stop":["x"],"stream":true}'},
   {"GET", "/v1/documents/" .. document}, {"GET", "/v1/documents/doc-ffffffffffffffffffffffff"},
   -- bad ones
   {"GET", "/nothing"}, {"GET", "/../../etc/passwd"}, {"GET", "/%00"}, {"PUT", "/v1/documents"}, {"BREW", "/"},
   {"POST", "/v1/chat/completions", json, '{"messages":'}, {"POST", "/v1/chat/completions", json, ""},
   {"POST", "/v1/chat/completions", json, '{"messages":[],"n":3}'}, {"POST", "/v1/chat/completions", key, chat()},
   {"POST", "/v1/chat/completions", json, chat(',"temperature":9')}, {"POST", "/v1/chat/completions", json, chat(',"tools":[1]')},
   {"POST", "/v1/chat/completions", nil, chat()}, {"POST", "/v1/completions", json, '{"prompt":"\xff\xfe"}'},
   {"POST", "/v1/completions", json, '{"prompt":"\\u0000"}'}, {"POST", "/v1/documents", json, '{"text":""}'},
   {"POST", "/v1/documents", json, '{"text":"A short text of no weight.","name":"\\u0007"}'},
   {"POST", "/v1/completions", json, string.rep("[", 1000)}, {"POST", "/v1/completions", json, string.rep("x", 300000)},
   {"DELETE", "/v1/documents/doc-ffffffffffffffffffffffff"}, {"GET", "/v1/models/" .. string.rep("m", 2000)},
   {"GET", "/health", {["Host"] = "evil.example"}},
}
local at = 0
function setup(thread)
   at = at + 7
   thread:set("at", at)
end
function request()
   at = at % #requests + 1
   local r = requests[at]
   return wrk.format(r[1], r[2], r[3], r[4])
end
local seen = {}
function response(status)
   seen[status] = (seen[status] or 0) + 1
end
